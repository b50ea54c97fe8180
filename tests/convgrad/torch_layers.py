"""Layers of PyTorch and ours, for the tests of `convgrad.torch`."""

from __future__ import annotations

from typing import Any

import pytest

from convgrad import Client

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/test-frameworks installs it")
ct = pytest.importorskip("convgrad.torch")

SIZES = {1: (7,), 2: (6, 5), 3: (4, 5, 3)}
LAYERS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {"kernel_size": 3, "bias": False}),
    "all": (False, {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 2, "groups": 2}),
    "same": (False, {"kernel_size": 2, "padding": "same", "dilation": 3}),
    "valid": (False, {"kernel_size": 2, "padding": "valid", "stride": 3}),
    "circular": (False, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
    "reflect": (False, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect", "stride": 2}),
    "depthwise": (False, {"kernel_size": 3, "padding": 1, "groups": 4}),
    "transposed": (True, {"kernel_size": 3, "bias": False}),
    "all transposed": (
        True,
        {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1, "dilation": 2, "groups": 2},
    ),
    "more output padding than stride": (True, {"kernel_size": 2, "dilation": 3, "padding": 2, "output_padding": 2}),
}
EVERY = pytest.mark.parametrize(("name", "rank"), [(name, rank) for name in LAYERS for rank in SIZES])


class Recording(Client):
    """The client, with a list of the operations that it was asked for and the layout of each, and the algorithms."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.calls: list[tuple[str, str, tuple[str, ...]]] = []
        self.algorithms: list[str] = []

    def run(self, op: str, inputs: Any, attributes: Any = None, **more: Any) -> Any:
        """Note the call and make it."""
        self.calls.append((op, attributes["data_format"], ()))
        self.algorithms += [more["algorithm"]] if "algorithm" in more else []
        return super().run(op, inputs, attributes, **more)

    def run_outputs(self, op: str, inputs: Any, attributes: Any = None, **more: Any) -> Any:
        """Note the call and make it."""
        self.calls.append((op, attributes["data_format"], tuple(more["outputs"])))
        self.algorithms.append(more["algorithm"])
        return super().run_outputs(op, inputs, attributes, **more)


def made(name: str, rank: int, dtype: Any = None, **backend: Any) -> tuple[Any, Any, Any]:
    """Return a layer of PyTorch with small integer parameters, ours that took it over, and an input."""
    n, shape, channels = 2, SIZES[rank], (4, 8) if name == "depthwise" else (4, 6)
    generator = torch.Generator().manual_seed(7)
    transposed, settings = LAYERS[name]
    kind = f"ConvTranspose{rank}d" if transposed else f"Conv{rank}d"
    layer = getattr(torch.nn, kind)(*channels, **settings).to(dtype or torch.float32)
    with torch.no_grad():
        for values in layer.parameters():
            values.copy_(torch.randint(-4, 5, values.shape, generator=generator))
    ours = getattr(ct, kind).of(layer, ct.Backend(**backend))
    src = torch.randint(-4, 5, (n, channels[0], *shape), generator=generator).to(dtype or torch.float32)
    return layer, ours, src.requires_grad_()


def results(layer: Any, src: Any) -> list[Any]:
    """Return the output of a layer, and the gradients of its input and parameters for some integers."""
    generator = torch.Generator().manual_seed(8)
    dst = layer(src)
    diff_dst = torch.randint(-4, 5, dst.shape, generator=generator).to(dst.dtype)
    return [dst.detach(), *torch.autograd.grad(dst, [src, *layer.parameters()], diff_dst)]
