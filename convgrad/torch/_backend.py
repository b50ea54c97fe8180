"""Compute layers of PyTorch on the service, and convert their tensors."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary, WeakValueDictionary

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from convgrad._client import Client
from convgrad._core import Algorithm
from convgrad._errors import Unsupported
from convgrad._events import Array
from convgrad._layer import GRADIENTS, Layer, Layout, bias_gradient, client_or_default

__all__ = ["Backend", "as_ncx", "in_layout", "layout_of"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# The names of clients in the arguments of operators, unique among processes: a program that was exported elsewhere
# never finds another client by one.
_names: WeakKeyDictionary[Client, str] = WeakKeyDictionary()
_clients: WeakValueDictionary[str, Client] = WeakValueDictionary()
_lock = threading.Lock()

if hasattr(os, "register_at_fork"):  # the thread that holds the lock is not in a child
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a layer is computed: by `client`, by default the one of `convgrad.torch.use`.

    With `forward="torch"` PyTorch computes outputs, and the service the gradients alone. `reference` selects the
    slow kernel that accumulates in float64; tensors of float64 always use it. `algorithm` is "direct", "auto" (the
    faster one), or "winograd", which raises `InvalidParams` where it can't compute the layer; by default the one of
    `convgrad.torch.use`. A copied or unpickled backend has the same settings; an unpickled one has the default client.
    """

    client: Client | None = None
    forward: Literal["service", "torch"] = "service"
    reference: bool = False
    algorithm: Algorithm | None = None
    key: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.forward not in ("service", "torch"):
            raise ValueError(f"forward must be 'service' or 'torch', but is {self.forward!r}")
        if self.algorithm not in (None, *get_args(Algorithm)):
            raise ValueError(f"algorithm must be {', '.join(get_args(Algorithm))} or None, but is {self.algorithm!r}")
        name = "" if self.client is None else _name(self.client)
        object.__setattr__(self, "key", f"{name}/{self.forward}/{int(self.reference)}/{self.algorithm or ''}")

    @classmethod
    def of(cls, key: str) -> Backend:
        """Return the backend with this `key`. Raises `RuntimeError` if its client is of another process."""
        name, *settings = key.split("/")
        forward, reference, algorithm = cast("Any", settings)
        client = _clients.get(name)
        if name and client is None:
            raise RuntimeError(
                "the client of this layer is not in this process: export layers without one, and choose it by"
                " convgrad.torch.use"
            )
        return cls(client, forward, reference == "1", algorithm or None)

    def __deepcopy__(self, memo: object) -> Backend:
        return self

    def __reduce__(self) -> tuple[type[Backend], tuple[None, str, bool, Algorithm | None]]:
        return Backend, (None, self.forward, self.reference, self.algorithm)

    def run(self, layer: Layer, src: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the output of a layer, of shape (N, O, X), in the memory format of `src`."""
        if self.forward == "torch":
            return _by_torch(layer, src, weights, bias)
        layout, reference = layout_of(src), self._reference(src)
        client = client_or_default(self.client)
        found = layer.run(
            client, in_layout(src, layout), weights, bias, layout=layout, reference=reference, algorithm=self.algorithm
        )
        return _tensor(found, src, layout)

    def gradients(
        self, layer: Layer, needs: Sequence[bool], src: Tensor, weights: Tensor, diff_dst: Tensor
    ) -> list[Tensor]:
        """Compute those gradients of input, weights and bias that are needed, in one call."""
        layout, reference = layout_of(src, diff_dst), self._reference(diff_dst)
        names = [name for name, needed in zip(GRADIENTS, needs, strict=True) if needed]
        found = layer.gradients(
            client_or_default(self.client), names, in_layout(src, layout), weights, in_layout(diff_dst, layout),
            layout=layout, reference=reference, algorithm=self.algorithm,
        )  # fmt: skip
        like = {"diff_src": src, "diff_weights": weights, "diff_bias": diff_dst}
        return [_tensor(found[name], like[name], layout if name == "diff_src" else "NCX") for name in names]

    def bias_add(self, src: Tensor, bias: Tensor) -> Tensor:
        """Compute BiasAdd: one value of `bias` added to each channel of `src`."""
        layout, reference = layout_of(src), self._reference(src)
        attributes = {"data_format": layout}
        inputs = {"src": in_layout(src, layout), "bias": bias}
        return _tensor(
            client_or_default(self.client).run("BiasAdd", inputs, attributes, reference=reference), src, layout
        )

    def bias_gradient(self, diff_dst: Tensor) -> Tensor:
        """Compute BiasAddBackward: the sum of each channel."""
        layout, reference = layout_of(diff_dst), self._reference(diff_dst)
        client = client_or_default(self.client)
        return _tensor(bias_gradient(client, in_layout(diff_dst, layout), layout=layout, reference=reference), diff_dst)

    def _reference(self, tensor: Tensor) -> bool:
        if tensor.dtype not in _DTYPES:
            names = ", ".join(str(dtype) for dtype in _DTYPES)
            raise Unsupported(f"convgrad computes {names}, but the tensor is {tensor.dtype}: convert it with .to()")
        return self.reference or tensor.dtype == torch.float64


def layout_of(*tensors: Tensor) -> Layout:
    """Return the layout of the first tensor whose memory is contiguous in one; NCX if none is."""
    for tensor in tensors:
        if tensor.is_contiguous():
            return "NCX"
        if tensor.movedim(1, -1).is_contiguous():
            return "NXC"
    return "NCX"


def in_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a tensor (N, C, X) with the axes of a layout, in the same memory."""
    return tensor if layout == "NCX" else tensor.movedim(1, -1)


def _tensor(array: Array | Tensor, like: Tensor, layout: Layout = "NCX") -> Tensor:
    """Return a result as a tensor (N, C, X) on the device of another one; on the CPU it shares the array's memory."""
    if isinstance(array, Tensor):  # computed on the GPU
        found = array
    elif array.dtype == _BFLOAT16:
        found = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    else:
        found = torch.from_numpy(array)
    return as_ncx(found.to(like.device), layout)


def as_ncx(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a tensor of this layout as PyTorch has it, (N, C, X), in the same memory."""
    return tensor if layout == "NCX" else tensor.movedim(-1, 1)


def _by_torch(layer: Layer, src: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the output of a layer with PyTorch."""
    rank = len(layer.strides)
    given: dict[str, Any] = {"stride": layer.strides, "dilation": layer.dilations, "groups": layer.groups}
    kind = "conv_transpose" if layer.transposed else "conv"
    compute = getattr(torch.nn.functional, f"{kind}{rank}d")
    if layer.transposed:
        extras = layer.output_padding or (0,) * rank
        pads = zip(layer.pads_begin, layer.pads_end, extras, strict=True)
        extra = [begin - end + more for begin, end, more in pads]
        found: Tensor = compute(src, weights, bias, padding=layer.pads_begin, output_padding=extra, **given)
        return found
    if layer.pads_begin != layer.pads_end:
        sides = [(end, begin) for begin, end in zip(layer.pads_begin, layer.pads_end, strict=True)]
        src = torch.nn.functional.pad(src, [size for pair in sides for size in pair][::-1])
        return compute(src, weights, bias, **given)
    return compute(src, weights, bias, padding=layer.pads_begin, **given)


def _name(client: Client) -> str:
    with _lock:
        if client not in _names:
            _names[client] = uuid.uuid4().hex
            _clients[_names[client]] = client
        return _names[client]


# As torch.compiler.assume_constant_result does, which also imports the compiler: two seconds.
vars(_name)["_dynamo_marked_constant"] = True
