"""What Triton asks of a driver to compile and to launch, without one: nothing runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget

__all__ = ["Driver"]


class Driver:
    """A GPU of a compute capability, such as 90, whose launches are kept in `launched`: grid, code and arguments."""

    def __init__(self, capability: int) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.keeps = True
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232448},
            load_binary=lambda name, *_: (name, name, 0, 0, 1024),
            unload_module=lambda _: None,
        )

    def launcher_cls(self, _src: Any, metadata: Any) -> Any:
        """Return what launches compiled code."""

        def launch(*given: Any) -> None:
            if self.keeps:
                self.launched.append((given[:3], metadata.hash, given[9:]))

        return launch

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the only GPU."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the default stream."""
        return device
