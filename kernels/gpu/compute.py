"""Compute problems on tensors of PyTorch that are on a GPU, on the current stream, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.chains.units import units_of
from kernels.gpu import configurations
from kernels.gpu.configurations import Generation, chunk_of, chunks_of, generation
from kernels.gpu.device import GpuMemoryError, refuse
from kernels.gpu.launches import ALIGNED, Launch
from kernels.gpu.products import multiply_boxes, multiply_dst, multiply_weights, split
from kernels.gpu.sums import add_bias, sum_channels, sum_dst, sum_weights
from kernels.gpu.tables import bias_problem, phases_of, pixels_of, spans_of, sums_of
from kernels.problem import ConvProblem, storage_dtype
from kernels.reference import REFERENCE

__all__ = ["TORCH_DTYPES", "compute", "prepared"]

TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}

_FEW_TERMS = 128
"""Terms of a sum up to which one chain of float32 sums them."""

_FEW_CHANNELS = 16
"""Channels of a group up to which taps and channels share the depth, or the columns, of a block."""

_LOWEST, _HIGHEST = 2.0**-480, 2.0**480
"""Magnitudes of float64 between which errors of products are exact (`kernels.expansion`)."""

_BLOCK = 1024

_MOST_WASTE = 1.25
"""Positions of boxes, to those of dst, from which on blocks are no boxes."""

Box = tuple[list[int], list[int]]


@dataclass(frozen=True)
class _Prepared:
    """A problem on a device: what computes it from its inputs, and the kernel that does most of that."""

    run: Callable[..., Tensor]
    kernel: str


def compute(problem: ConvProblem, *inputs: Tensor, reference: bool = False, device: Any = None) -> Tensor:
    """Compute a problem from tensors of its `input_shapes` and dtype, on a device, by default that of the first.

    With `reference`, and always for f64, the result has the bits of the CPU's reference kernel. Only f64 waits for the
    GPU, to find values beyond 2**-480 and 2**480, Inf or NaN: such tensors are summed on the CPU.

    Raises `GpuMemoryError` if the GPU's memory does not hold what is needed beside the inputs.
    """
    device = device or inputs[0].device
    try:
        inputs = tuple([each.detach().to(device).contiguous() for each in inputs])
        found = prepared(problem, reference, device)
        if device.type != "cuda":  # Triton's interpreter
            return found.run(*inputs)
        with torch.cuda.device(device):
            return found.run(*inputs)
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(_bytes_of(problem), _free(device)) from error


def _free(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that this process can still have."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    within = int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved
    found: int = max(0, min(free, within)) + reserved - torch.cuda.memory_allocated(device)
    return found


def _bytes_of(problem: ConvProblem) -> int:
    """Return the bytes of the result, and of the parts of float32 inputs."""
    fast = problem.dtype == "f32" and len(problem.input_shapes) > 1
    values = prod(problem.output_shape) * storage_dtype(problem.dtype).itemsize
    return values + fast * sum(6 * prod(shape) for shape in problem.input_shapes[:2])


@lru_cache(4096)
def prepared(problem: ConvProblem, reference: bool, device: torch.device) -> _Prepared:
    """Choose kernels and configurations for a problem, and put their tables on the device."""
    of = _generation(device)
    exact = problem.dtype == "f64"
    if problem.op == "BiasAdd":
        return _Prepared(_bias_add(problem, device), "add_bias")
    if problem.computes == "diff_bias":
        summed = bias_problem(problem)
        if reference or exact:
            return _Prepared(_checked(problem, _sum_weights(summed, device, ones=True)), "reference")
        return _Prepared(_sum_channels(summed, of, device, ones=True), "sum_channels")
    run, name = None, ""
    if not reference and not exact and problem.macs:
        if problem.forward:
            run, name = _fast_dst(problem, of, device)
        else:
            run, name = _fast_weights(problem, of, device)
    if run is None:
        general = _sum_dst(problem, device) if problem.forward else _sum_weights(problem, device)
        run, name = _checked(problem, general), "reference"
    return _Prepared(run, name)


def _generation(device: torch.device) -> Generation:
    if device.type != "cuda":
        return generation(90)
    if (refusal := refuse(device)) is not None:  # another one than the first
        raise RuntimeError(refusal)
    major, minor = torch.cuda.get_device_capability(device)
    return generation(10 * major + minor)


def _on(device: torch.device, *tables: np.ndarray[Any, Any]) -> list[Tensor]:
    return [torch.from_numpy(table).to(device) for table in tables]


def _checked(problem: ConvProblem, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute what exact sums on the GPU do not cover on the CPU."""
    if problem.dtype != "f64":
        return run

    def checked(*inputs: Tensor) -> Tensor:
        for each in inputs:
            size = each.abs()
            if not bool(((size == 0) | ((size >= _LOWEST) & (size < _HIGHEST))).all()):
                return _on_cpu(problem, inputs)
        return run(*inputs)

    return checked


def _on_cpu(problem: ConvProblem, inputs: Sequence[Tensor]) -> Tensor:
    arrays = [each.cpu().numpy() for each in inputs]
    found = np.empty(problem.output_shape)
    for unit in units_of(problem, 1):
        REFERENCE.run(problem, unit, arrays, found, None, lambda: False)
    return torch.from_numpy(found).to(inputs[0].device)


def _bias_add(problem: ConvProblem, device: torch.device) -> Callable[..., Tensor]:
    (table,) = _on(device, sums_of(bias_problem(problem)))
    launch = Launch(add_bias, (ceil(prod(problem.output_shape) / _BLOCK),), BLOCK=_BLOCK)

    def run(src: Tensor, bias: Tensor) -> Tensor:
        dst = torch.empty_like(src)
        launch(src, bias, dst, table)
        return dst

    return run


def _sum_dst(
    problem: ConvProblem, device: torch.device, kind: Any = tl.float64, *, repairs: bool = False
) -> Callable[..., Tensor]:
    """Return what computes dst by `sum_dst`, or repairs it, given also dst and the flag."""
    table, spans = _on(device, sums_of(problem), spans_of(problem))
    dims = problem.dims
    rows, channels = dims.n * prod(dims.dst), problem.dst_channels
    columns = 1 if problem.data_format == "NCX" else min(64, triton.next_power_of_2(max(1, channels)))
    block = max(16, 128 // columns)
    launch = Launch(
        sum_dst, (ceil(rows / block) * ceil(channels / columns),),
        SUM=kind, EXACT=problem.dtype == "f64", GATHERS=dims.gathers, BIAS=problem.bias, REPAIR=repairs, ROWS=block,
        COLUMNS=columns, enable_fp_fusion=problem.dtype != "f64",
    )  # fmt: skip
    shape, has_bias = problem.output_shape, problem.bias

    def run(src: Tensor, weights: Tensor, *more: Tensor) -> Tensor:
        bias = more[0] if has_bias else src
        dst, flag = more[-2:] if repairs else (src.new_empty(shape), src)
        launch(src, weights, bias, dst, table, spans, flag)
        return dst

    return run


def _sum_weights(
    problem: ConvProblem, device: torch.device, *, ones: bool = False, chunks: int = 0
) -> Callable[..., Tensor]:
    """Return what computes diff_weights by `sum_weights`, given the tensors, and the sums of chunks if there are."""
    table, spans = _on(device, sums_of(problem), spans_of(problem))
    count, exact = prod(problem.output_shape), problem.dtype == "f64"
    launch = Launch(
        sum_weights, (ceil(count / 128),), chunks,
        SUM=tl.float64, EXACT=exact, ONES=ones, PARTS=chunks > 0, BLOCK=128, enable_fp_fusion=not exact,
    )  # fmt: skip
    shape = (count,) if ones else problem.output_shape
    places = (0, 0) if ones else problem.places

    def run(*inputs: Tensor) -> Tensor:
        wide, narrow = (inputs[place] for place in places)
        out = narrow.new_empty(shape)
        launch(wide, narrow, out, inputs[-1] if chunks else narrow, table, spans)
        return out

    return run


def _sum_channels(
    problem: ConvProblem, of: Generation, device: torch.device, *, ones: bool = False
) -> Callable[..., Tensor]:
    """Return what computes depthwise diff_weights, or with `ones` diff_bias, in chunks of pixels."""
    dims = problem.dims
    table, spans = _on(device, sums_of(problem), spans_of(problem))
    pixels, channels = dims.n * prod(dims.narrow), dims.groups * dims.narrow_channels
    first = problem.data_format == "NCX"
    columns = 1 if first else min(64, triton.next_power_of_2(max(1, channels)))
    block = 2048 // columns if first else 1024 // columns
    across = ceil(channels / columns), prod(dims.kernel) * dims.wide_channels
    chunks = chunks_of(of, pixels, prod(across), block)
    chunk = chunk_of(pixels, chunks, block)
    chunks = max(1, ceil(pixels / chunk))
    launch = Launch(sum_channels, (*across, chunks), chunk, ONES=ones, PIXELS=block, COLUMNS=columns)
    finish = _sum_weights(problem, device, ones=ones, chunks=chunks)
    size = chunks, prod(problem.weights_shape)
    places = (0, 0) if ones else problem.places

    def run(*inputs: Tensor) -> Tensor:
        wide, narrow = (inputs[place] for place in places)
        parts = torch.empty(size, dtype=torch.float32, device=narrow.device)
        launch(wide, narrow, parts, table, spans)
        return finish(*inputs, parts)

    return run


def _parts(problem: ConvProblem) -> int:
    return 3 if problem.dtype == "f32" else 1


def _operand(parts: int, count: int) -> Callable[[Tensor], Tensor]:
    """Return what makes a contiguous copy of a tensor, or takes it as it is; of float32 three parts."""
    if parts == 1:
        return lambda tensor: tensor.contiguous()
    launch = Launch(split, (ceil(count / _BLOCK),), count, BLOCK=_BLOCK)

    def three(tensor: Tensor) -> Tensor:
        found = torch.empty((parts, count), dtype=torch.bfloat16, device=tensor.device)
        launch(tensor.contiguous(), found)
        return found

    return three


def _data(problem: ConvProblem, parts: int, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return what makes an operand, channels-last, of a data tensor."""
    operand = _operand(parts, prod(shape))
    return operand if problem.data_format == "NXC" else lambda tensor: operand(tensor.movedim(1, -1))


def _factors(problem: ConvProblem, parts: int) -> Callable[[Tensor], Tensor]:
    """Return what makes an operand, (groups, taps, channels of dst, channels of src), of weights."""
    dims = problem.dims
    group, wide, narrow, tap = problem.weights_strides
    steps = (group, tap, *((narrow, wide) if dims.gathers else (wide, narrow)))
    shape = dims.groups, prod(dims.kernel), dims.dst_channels, dims.src_channels
    operand = _operand(parts, prod(shape))
    return lambda weights: operand(weights.as_strided(shape, steps))


def _fast_dst(problem: ConvProblem, of: Generation, device: torch.device) -> tuple[Callable[..., Tensor] | None, str]:
    """Return what computes dst in float32, and its name; None if nothing does."""
    dims, parts = problem.dims, _parts(problem)
    if dims.src_channels * min(dims.dst_channels, 16) <= 16 and prod(dims.kernel) * dims.src_channels <= _FEW_TERMS:
        return _sum_dst(problem, device, tl.float32), "sum_dst"
    phases = phases_of(problem)
    sizes = prod(dims.src), dims.n * prod(dims.dst) * 2, prod(problem.weights_shape) * parts
    if phases is None or max(sizes) >= 1 << 31 or dims.groups >= 1 << 16:
        return None, ""
    (table,) = _on(device, phases)
    blocks = configurations.blocks_of_dst(of, parts, dims.src_channels, dims.dst_channels)
    flat = triton.next_power_of_2(dims.src_channels) if dims.src_channels < _FEW_CHANNELS else 0
    grid = (
        ceil(int(phases[:, -1].max()) / blocks.rows) * ceil(dims.dst_channels / blocks.columns),
        len(phases),
        dims.groups,
    )
    launch = Launch(
        multiply_dst, grid, *map(prod, problem.input_shapes[:2]), dims.src_channels, dims.dst_channels,
        PARTS=parts, FLAT=flat, BIAS=problem.bias, FIRST=problem.data_format == "NCX", ROWS=blocks.rows,
        COLUMNS=blocks.columns, DEPTH=blocks.depth, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    data, factors = _data(problem, parts, problem.input_shapes[0]), _factors(problem, parts)
    name, shape, repair = "multiply_dst", problem.output_shape, _sum_dst(problem, device, repairs=True)
    if (boxes := _boxes(problem, of, phases)) is not None:
        name, (launch, src_box, weights_box) = "multiply_boxes", boxes
        data, factors = _described(data, *src_box), _described(factors, *weights_box)

    def run(src: Tensor, weights: Tensor, *bias: Tensor) -> Tensor:
        dst = src.new_empty(shape)
        flag = torch.zeros(1, dtype=torch.int32, device=src.device)
        launch(data(src), factors(weights), bias[0] if bias else dst, dst, flag, table)
        return repair(src, weights, *bias, dst, flag)

    return run, name


def _boxes(problem: ConvProblem, of: Generation, phases: np.ndarray[Any, Any]) -> tuple[Launch, Box, Box] | None:
    """Return the launch of `multiply_boxes`, and the shape and block of its operands; None where it serves badly."""
    dims, parts = problem.dims, _parts(problem)
    blocks = configurations.blocks_of_boxes(of, parts, dims.dst_channels)
    sizes = [dims.n, *phases[:, [0, 12, 24]].max(0).tolist()]
    box = configurations.box_of(blocks.rows, sizes)
    counts = [ceil(size / side) for size, side in zip(sizes, box, strict=True)]
    if (
        of.capability < 90 or dims.src_channels % blocks.depth or dims.dst_channels < _FEW_CHANNELS
        or (phases[:, [8, 20, 32]] != 1).any() or prod(counts) * blocks.rows > _MOST_WASTE * prod(sizes)
    ):  # fmt: skip
        return None
    launch = Launch(
        multiply_boxes, (prod(counts) * ceil(dims.dst_channels / blocks.columns), len(phases), dims.groups),
        dims.n, dims.src_channels, dims.dst_channels,
        PARTS=parts, BIAS=problem.bias, FIRST=problem.data_format == "NCX", N=box[0], D=box[1], H=box[2], W=box[3],
        COLUMNS=blocks.columns, DEPTH=blocks.depth, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    src = [parts * dims.n, *dims.src, dims.groups * dims.src_channels]
    weights = [parts * prod(problem.weights_shape) // dims.src_channels, dims.src_channels]
    return launch, (src, [*box, blocks.depth]), (weights, [blocks.columns, blocks.depth])


def _described(operand: Callable[[Tensor], Tensor], shape: list[int], block: list[int]) -> Callable[[Tensor], Any]:
    """Return what makes the description of an operand for bulk copies, which need it to be aligned."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def describe(tensor: Tensor) -> TensorDescriptor:
        found = operand(tensor)
        return TensorDescriptor(found if found.data_ptr() % ALIGNED == 0 else found.clone(), shape, strides, block)

    return describe


def _fast_weights(
    problem: ConvProblem, of: Generation, device: torch.device
) -> tuple[Callable[..., Tensor] | None, str]:
    """Return what computes diff_weights in float32, and its name; None if nothing does."""
    dims, parts = problem.dims, _parts(problem)
    if dims.wide_channels * dims.narrow_channels <= 4 and prod(dims.kernel) < 1 << 14:
        return _sum_channels(problem, of, device), "sum_channels"
    pixels = dims.n * prod(dims.narrow)
    blocks = configurations.blocks_of_weights(of, parts, dims.narrow_channels, dims.wide_channels)
    flat = triton.next_power_of_2(dims.wide_channels) if dims.wide_channels < _FEW_CHANNELS else 0
    taps = prod(dims.kernel)
    columns = ceil(taps * flat / blocks.columns) if flat else taps * ceil(dims.wide_channels / blocks.columns)
    programs = ceil(dims.narrow_channels / blocks.rows) * columns
    chunks = chunks_of(of, pixels, programs * dims.groups, blocks.depth)
    chunk = chunk_of(pixels, chunks, blocks.depth)
    chunks = ceil(pixels / chunk)
    found = pixels_of(problem, chunk)
    if found is None or max(prod(dims.wide), prod(problem.output_shape)) >= 1 << 31 or dims.groups >= 1 << 16:
        return None, ""
    (table,) = _on(device, found)
    shapes = [problem.input_shapes[place] for place in problem.places]
    launch = Launch(
        multiply_weights, (programs, chunks, dims.groups), *map(prod, shapes), dims.wide_channels, dims.narrow_channels,
        PARTS=parts, FLAT=flat, ROWS=blocks.rows, COLUMNS=blocks.columns, DEPTH=blocks.depth, num_warps=blocks.warps,
        num_stages=blocks.stages,
    )  # fmt: skip
    finish = _sum_weights(problem, device, chunks=chunks)
    operands = [_data(problem, parts, shape) for shape in shapes]
    places, size = problem.places, (chunks, prod(problem.output_shape))

    def run(*inputs: Tensor) -> Tensor:
        wide, narrow = (operand(inputs[place]) for operand, place in zip(operands, places, strict=True))
        sums = torch.empty(size, dtype=torch.float32, device=wide.device)
        launch(wide, narrow, sums, table)
        return finish(*inputs, sums)

    return run, "multiply_weights"
