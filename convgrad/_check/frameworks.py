"""Operations of PyTorch, JAX and ONNX Runtime as kernels, and conversions of arrays to those of a framework.

The frameworks are optional: each is imported when a kernel of it is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FRAMEWORKS", "converter", "framework"]

Array = npt.NDArray[Any]
Attributes = Mapping[str, Any]
Kernel = Callable[..., Any]


def framework(name: str) -> Kernel:
    """Return the kernel of a framework. Raises `ValueError` if it is not installed."""
    for package in ("onnxruntime", "onnx") if name == "onnxruntime" else (name,):
        _module(package)
    return FRAMEWORKS[name]


def converter(arrays: str) -> Callable[[Array], Any]:
    """Return the function that makes arrays of ``numpy``, ``torch``, ``jax`` (with ``:DEVICE``) or ``cupy``."""
    name, _, device = arrays.partition(":")
    if name == "torch":
        torch = _module("torch")

        def tensor(array: Array) -> Any:
            if array.dtype.name == "bfloat16":
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device or "cpu")
            return torch.from_numpy(array).to(device or "cpu")

        return tensor
    if name == "jax":
        jax = _module("jax")
        where = jax.devices(device or None)[0]
        return lambda array: jax.device_put(array.copy(), where)  # JAX may keep the memory of an array
    if arrays == "cupy":
        copied: Callable[[Array], Any] = _module("cupy").asarray
        return copied
    if arrays not in ("numpy", "onnxruntime"):
        raise ValueError("arrays must be numpy, torch, torch:DEVICE, jax, jax:DEVICE or cupy")
    return lambda array: array


@cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"this kernel needs the package {name}, which can't be imported: {error}") from error


def _axes(given: str, wanted: str, rank: int) -> list[int]:
    """Return the permutation of axes from one format to another; X stands for several."""
    axes: dict[str, list[int]] = {}
    for letter in given:
        start = sum(map(len, axes.values()))
        axes[letter] = list(range(start, start + (rank - 2 if letter == "X" else 1)))
    return [axis for letter in wanted for axis in axes[letter]]


def _permuted(tensor: Any, given: str, wanted: str) -> Any:
    """Return a tensor in another format."""
    axes = _axes(given, wanted, tensor.ndim)
    return tensor.permute(*axes) if hasattr(tensor, "permute") else tensor.transpose(*axes)


def _bias(op: str, inputs: dict[str, Any], data_format: str) -> Any:
    """Compute BiasAdd or BiasAddBackward."""
    data = _permuted(next(iter(inputs.values())), data_format, "NCX")
    if op == "BiasAddBackward":
        return data.sum(tuple([axis for axis in range(data.ndim) if axis != 1]))
    return _permuted(data + inputs["bias"].reshape(-1, *[1] * (data.ndim - 2)), "NCX", data_format)


def _torch(op: str, inputs: dict[str, Any], attributes: Attributes, output_shape: Sequence[int]) -> Any:
    """Compute with `torch.nn.functional` and its automatic derivatives."""
    torch = _module("torch")
    if op.startswith("BiasAdd"):
        return _bias(op, inputs, attributes["data_format"])
    if attributes["pads_begin"] != attributes["pads_end"] and not all(
        bool(x.isfinite().all()) for x in inputs.values()
    ):
        raise NotImplementedError("pads that differ are added here, as zeros, which Inf turns into NaN")
    transposed, backward = op.startswith("ConvTranspose"), "Backward" in op
    formats = {"data": attributes["data_format"], "weights": attributes["weights_format"]}
    ours = {"data": "NCX", "weights": "IOX" if transposed else "OIX"}
    like = next(iter(inputs.values()))
    of = "weights" if op.endswith("Weights") else "src"
    given = dict(inputs)
    if backward:
        given[of] = torch.zeros(output_shape, dtype=like.dtype, device=like.device)
    for name in ("src", "weights", "diff_dst"):
        kind = "weights" if name == "weights" else "data"
        if name in given:
            given[name] = _permuted(given[name], formats[kind], ours[kind])
    with torch.set_grad_enabled(backward):
        given[of] = given[of].detach().requires_grad_(backward)
        conv = _torch_conv_transpose if transposed else _torch_conv
        found = conv(given["src"], given["weights"], given.get("bias"), attributes)
    if backward:
        (found,) = torch.autograd.grad(found, given[of], given["diff_dst"])
    kind = "weights" if backward and of == "weights" else "data"
    return _permuted(found, ours[kind], formats[kind])


def _torch_conv(src: Any, weights: Any, bias: Any, attributes: Attributes) -> Any:
    functional = _module("torch").nn.functional
    begin, end = attributes["pads_begin"], attributes["pads_end"]
    padding = list(begin)
    if list(begin) != list(end):
        src = functional.pad(src, [size for pair in zip(begin[::-1], end[::-1], strict=True) for size in pair])
        padding = [0] * len(padding)
    conv = getattr(functional, f"conv{len(padding)}d")
    return conv(src, weights, bias, attributes["strides"], padding, attributes["dilations"], attributes["groups"])


def _torch_conv_transpose(src: Any, weights: Any, bias: Any, attributes: Attributes) -> Any:
    functional = _module("torch").nn.functional
    begin, end, extra = (attributes[name] for name in ("pads_begin", "pads_end", "output_padding"))
    same = list(begin) == list(end)
    conv = getattr(functional, f"conv_transpose{len(begin)}d")
    found = conv(src, weights, bias, attributes["strides"], begin if same else 0, extra, attributes["groups"],
                 attributes["dilations"])  # fmt: skip
    if not same:
        cuts = zip(begin, end, found.shape[2:], strict=True)
        found = found[(..., *[slice(first, size - last) for first, last, size in cuts])]
    return found


def _jax(op: str, inputs: dict[str, Any], attributes: Attributes, output_shape: Sequence[int]) -> Any:
    """Compute with `jax.lax.conv_general_dilated` and its derivatives; ConvTranspose is one of these."""
    jax, jnp = _module("jax"), _module("jax.numpy")
    data_format = attributes["data_format"]
    if op.startswith("BiasAdd"):
        return _bias(op, inputs, data_format)
    form = attributes["weights_format"]
    transposed = op.startswith("ConvTranspose")
    ours = "IOX" if transposed else "OIX"  # as the convolution from the wide tensor to the narrow one has it
    wide, narrow = ("diff_dst", "src") if transposed else ("src", "diff_dst")
    data = {name: _permuted(inputs[name], data_format, "NCX") for name in (wide, narrow) if name in inputs}
    pads = list(zip(attributes["pads_begin"], attributes["pads_end"], strict=True))

    def conv(wide: Any, weights: Any) -> Any:
        return jax.lax.conv_general_dilated(
            wide, weights, attributes["strides"], pads, rhs_dilation=attributes["dilations"],
            feature_group_count=attributes["groups"],
        )  # fmt: skip

    zeros = jnp.zeros(output_shape, next(iter(inputs.values())).dtype)
    if op.endswith("BackwardWeights"):
        (found,) = jax.vjp(lambda weights: conv(data[wide], weights), _permuted(zeros, form, ours))[1](data[narrow])
        return _permuted(found, ours, form)
    weights = _permuted(inputs["weights"], form, ours)
    if wide in data:
        return _permuted(conv(data[wide], weights), "NCX", data_format)
    like = _permuted(zeros, data_format, "NCX")
    (found,) = jax.vjp(lambda wide: conv(wide, weights), like)[1](data[narrow])
    return _permuted(found, "NCX", data_format)


def _onnxruntime(op: str, inputs: dict[str, Any], attributes: Attributes) -> Any:
    """Compute a node Conv or ConvTranspose."""
    onnx, runtime = _module("onnx"), _module("onnxruntime")
    kind, wanted = ("ConvTranspose", "IOX") if op.startswith("ConvTranspose") else ("Conv", "OIX")
    tensors = dict(inputs, weights=_permuted(inputs["weights"], attributes["weights_format"], wanted))
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    more = {"output_padding": list(attributes["output_padding"])} if kind == "ConvTranspose" else {}
    helper, number = onnx.helper, onnx.TensorProto.FLOAT
    node = helper.make_node(
        kind, list(tensors), ["dst"], strides=list(attributes["strides"]), dilations=list(attributes["dilations"]),
        pads=[*attributes["pads_begin"], *attributes["pads_end"]], group=attributes["groups"], **more,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "check", [helper.make_tensor_value_info(name, number, array.shape) for name, array in tensors.items()],
        [helper.make_tensor_value_info("dst", number, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, tensors)[0]


_torch.takes = {"dtypes": ["f32", "f16", "bf16"]}  # type: ignore[attr-defined]
_jax.takes = {"dtypes": ["f32", "f16", "bf16"], "bias": False}  # type: ignore[attr-defined]
_onnxruntime.takes = {"ops": ["Convolution", "ConvTranspose"], "data_formats": ["NCX"]}  # type: ignore[attr-defined]

FRAMEWORKS: dict[str, Kernel] = {"torch": _torch, "jax": _jax, "onnxruntime": _onnxruntime}
"""The kernel of each framework."""
