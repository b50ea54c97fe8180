"""A convolution layer of a framework, and the calls that compute its output and gradients."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from convgrad._client import Client
from convgrad._core import Algorithm
from convgrad._errors import Unsupported
from convgrad._events import Array
from convgrad._local import local

__all__ = ["GRADIENTS", "Layer", "Layout", "client_or_default", "use"]

Layout = Literal["NCX", "NXC"]

GRADIENTS = ("diff_src", "diff_weights", "diff_bias")
"""The gradients of a layer, for input, weights and bias."""

_lock = threading.Lock()
_chosen: Client | None = None
_own: tuple[int, Client] | None = None
_algorithm: Algorithm = "direct"

if hasattr(os, "register_at_fork"):  # the thread that holds the lock is not in a child
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def use(client: Client | None = None, *, algorithm: Algorithm = "direct") -> None:
    """Set the defaults; without a client the service at CONVGRAD_URL if that is set, and else this process computes.

    `algorithm` is "direct", "auto" (the faster one), or "winograd" for all layers and their gradients, which raises
    `InvalidParams` where it can't compute one.
    """
    global _chosen, _own, _algorithm
    with _lock:
        _chosen, _algorithm = client, algorithm
        if _own is not None and _own[0] == os.getpid():
            _own[1].close()
        _own = None


def client_or_default(client: Client | None) -> Client:
    """Return `client`, or else the one set by `use`, or else that of the environment, or of this process."""
    global _own
    if client is not None:
        return client
    with _lock:
        if _chosen is not None:
            return _chosen
        # A child process must not use its parent's connections.
        if _own is None or _own[0] != os.getpid():
            _own = os.getpid(), Client() if os.environ.get("CONVGRAD_URL") else local()
        return _own[1]


@dataclass(frozen=True, slots=True)
class Layer:
    """The attributes of a layer, one number for each spatial axis; dilation 1 is dense.

    `weights_format` names the axes of the weights: I are the channels of src, O those of dst, X is the kernel.
    """

    transposed: bool
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    weights_format: str = "OIX"

    @property
    def family(self) -> str:
        """The prefix of the layer's operations."""
        return "ConvTranspose" if self.transposed else "Convolution"

    def attributes(self, layout: Layout) -> dict[str, Any]:
        """Return the attributes of the layer's operations on tensors of this layout."""
        given: dict[str, Any] = {
            "strides": self.strides,
            "dilations": self.dilations,
            "pads_begin": self.pads_begin,
            "pads_end": self.pads_end,
            "groups": self.groups,
            "data_format": layout,
            "weights_format": self.weights_format,
        }
        return given | ({"output_padding": self.output_padding} if self.transposed and self.output_padding else {})

    def run(
        self, client: Client, src: Any, weights: Any, bias: Any = None, *,
        layout: Layout, reference: bool = False, algorithm: Algorithm | None = None,
    ) -> Array:  # fmt: skip
        """Compute dst; `bias` has one value for each channel of dst. `algorithm` is by default the one of `use`."""
        inputs = {"src": src, "weights": weights} | ({} if bias is None else {"bias": bias})
        how = _how(reference, algorithm)
        return client.run(self.family, inputs, self.attributes(layout), **how)

    def gradients(
        self, client: Client, names: Sequence[str], src: Any, weights: Any, diff_dst: Any, *,
        layout: Layout, reference: bool = False, algorithm: Algorithm | None = None,
    ) -> Mapping[str, Array]:  # fmt: skip
        """Compute some of the `GRADIENTS`, by name, in one call.

        Of `src` only the shape is read for diff_src and diff_bias, and of `weights` for diff_weights and diff_bias.
        """
        attributes = self.attributes(layout)
        how = _how(reference, algorithm)
        if list(names) == ["diff_src"]:
            inputs: dict[str, Any] = {"diff_dst": diff_dst, "weights": weights}
            if not self.transposed:  # several shapes of src may give that of diff_dst
                inputs["dst_shape"] = list(src.shape)
            return {"diff_src": client.run(f"{self.family}BackwardData", inputs, attributes, **how)}
        if list(names) == ["diff_bias"]:
            return {"diff_bias": bias_gradient(client, diff_dst, layout=layout, reference=reference)}
        inputs = {"src": src, "diff_dst": diff_dst, "weights_shape": list(weights.shape)}
        if "diff_src" in names:
            inputs["weights"] = weights
        op = f"{self.family}BackwardWeights"
        if list(names) == ["diff_weights"]:
            return {"diff_weights": client.run(op, inputs, attributes, **how)}
        return client.run_outputs(op, inputs, attributes, outputs=names, **how)

    def folded(self) -> Layer:
        """Return the same layer with an output padding below its stride, as the service requires.

        Frameworks allow more where the dilation is larger than the stride; it is the same as less padding at the end.
        Raises `Unsupported` where the padding is too small for that.
        """
        if all(extra < stride for extra, stride in zip(self.output_padding, self.strides, strict=False)):
            return self
        pads, extras = [], []
        for pad, extra, stride in zip(self.pads_end, self.output_padding, self.strides, strict=True):
            fold = min(pad, extra) if extra >= stride else 0
            pads.append(pad - fold)
            extras.append(extra - fold)
            if extra - fold >= stride:
                raise Unsupported(
                    f"output_padding must be less than stride, or than stride plus padding, but is {extra} with stride"
                    f" {stride} and padding {pad}"
                )
        return Layer(
            self.transposed, self.strides, self.dilations, self.pads_begin, tuple(pads), tuple(extras), self.groups,
            self.weights_format,
        )  # fmt: skip


def _how(reference: bool, algorithm: Algorithm | None) -> dict[str, Any]:
    """Return the options of a call."""
    return {"reference": reference, "algorithm": algorithm or _algorithm}


def bias_gradient(client: Client, diff_dst: Any, *, layout: Layout, reference: bool) -> Array:
    """Compute diff_bias, the sum of each channel of `diff_dst`, which has one to three spatial axes."""
    if len(diff_dst.shape) == 3:  # the operation has two axes or three
        diff_dst = diff_dst[:, :, None] if layout == "NCX" else diff_dst[:, None]
    attributes = {"data_format": layout}
    return client.run("BiasAddBackward", {"diff_dst": diff_dst}, attributes, reference=reference)
