"""Time convolutions on a GPU: cuDNN, its deterministic algorithms and ours, and training steps of ResNet.

    python -m benchmarks.gpu [--dtypes f32,bf16,f16] [--layers NAME ..] [--steps 5] [--batch 64]

Needs a GPU, the extra [gpu] and, for training steps, torchvision. Prints TFLOP/s of each layer's output and gradients,
cuDNN's in its better layout, ours channels-last, each a median of several runs in one process after the first, the
ratios, the relative errors of f32 against float64, the rates of matrix products as ceilings, and microseconds of the
host for a call (`tests/kernels/gpu/host.py` has those without a GPU and its driver); then seconds of a
training step with `torch.use_deterministic_algorithms(True)` and with `convgrad.torch.replace`.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

import convgrad
import convgrad.torch
from kernels.gpu.device import describe, refuse

LAYERS = {
    "3x3 256 @56": (64, 256, 256, 56, 3, 1), "3x3 64 @112": (64, 64, 64, 112, 3, 1),
    "1x1 256-1024 @28": (128, 256, 1024, 28, 1, 1), "3x3 512 @14": (256, 512, 512, 14, 3, 1),
    "3x3 s2 128-256 @56": (64, 128, 256, 56, 3, 2), "7x7 s2 stem": (64, 3, 64, 224, 7, 2),
    "resnet 3x3 64 @56": (64, 64, 64, 56, 3, 1), "resnet 1x1 256-64 @56": (64, 256, 64, 56, 1, 1),
    "resnet 1x1 s2 256-512 @56": (64, 256, 512, 56, 1, 2), "resnet 3x3 128 @28": (64, 128, 128, 28, 3, 1),
    "resnet 3x3 512 @7": (64, 512, 512, 7, 3, 1), "resnet 1x1 2048-512 @7": (64, 2048, 512, 7, 1, 1),
    "unet 3x3 64 @256": (8, 64, 64, 256, 3, 1), "unet 3x3 1024-512 @32": (8, 1024, 512, 32, 3, 1),
}  # fmt: skip
"""Images, channels of src and dst, positions of each of two axes, taps, stride."""

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PARTS = ("forward", "data", "weights")
_RUNS = 7
_LEAST_S = 5e-3
_LAUNCHED = 50


def seconds(run: Callable[[], object]) -> float:
    """Return the median seconds of a run on the GPU."""
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(1, math.ceil(_LEAST_S / max(1e-6, time.perf_counter() - begun)))
    found: list[float] = []
    for _ in range(_RUNS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(repeats):
            run()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3 / repeats)
    return statistics.median(found)


def of_cudnn(part: str, stride: int, pad: int, src: Any, weights: Any, diff_dst: Any) -> Any:
    """Compute a part of a layer by PyTorch."""
    if part == "forward":
        return torch.nn.functional.conv2d(src, weights, stride=stride, padding=pad)
    mask = (part == "data", part == "weights", False)
    how = None, (stride,) * 2, (pad,) * 2, (1, 1), False, (0, 0), 1, mask
    return torch.ops.aten.convolution_backward(diff_dst, src, weights, *how)[0 if mask[0] else 1]


def of_ours(part: str, stride: int, pad: int, src: Any, weights: Any, diff_dst: Any) -> Any:
    """Compute a part of a layer by the client of `convgrad.torch.use`."""
    if part == "forward":
        return convgrad.torch.conv(src, weights, stride=stride, padding=pad)
    if part == "data":
        return convgrad.torch.conv_input(src.shape, weights, diff_dst, stride, pad)
    return convgrad.torch.conv_weight(src, weights.shape, diff_dst, stride, pad)


def time_host(dtype: str) -> None:
    """Print what the host takes to launch a call on a small layer, which it does faster than the GPU computes it."""
    shapes = (8, 64, 14, 14), (64, 64, 3, 3), (8, 64, 14, 14)
    first = [torch.randn(shape, device="cuda").to(DTYPES[dtype]) for shape in shapes]
    tensors = [tensor.contiguous(memory_format=torch.channels_last) for tensor in first]
    for part in PARTS:
        found = []
        for compute in (of_cudnn, of_ours):
            run = partial(compute, part, 1, 1, *tensors)
            run()
            times = []
            for _ in range(_RUNS):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(_LAUNCHED):
                    run()
                times.append((time.perf_counter() - begun) / _LAUNCHED * 1e6)
            found.append(statistics.median(times))
        print(f"{dtype} {part:8} host, us a call: cuDNN {found[0]:.0f} ours {found[1]:.0f}", flush=True)


def time_layer(name: str, dtype: str) -> None:
    """Print the rates of a layer's parts."""
    n, few, many, size, taps, stride = LAYERS[name]
    pad = taps // 2
    out = (size + 2 * pad - taps) // stride + 1
    work = 2 * n * few * many * taps * taps * out * out
    shapes = (n, few, size, size), (many, few, taps, taps), (n, many, out, out)
    first = [torch.randn(shape, device="cuda").to(DTYPES[dtype]) for shape in shapes]
    last = [tensor.contiguous(memory_format=torch.channels_last) for tensor in first]
    for part in PARTS:
        how = part, stride, pad
        rates = []
        for deterministic in (False, True):
            torch.backends.cudnn.deterministic = deterministic
            best = min(seconds(partial(of_cudnn, *how, *each)) for each in (first, last))
            rates.append(work / best / 1e12)
        ours = work / seconds(partial(of_ours, *how, *last)) / 1e12
        errors = ""
        if dtype == "f32":
            torch.backends.cudnn.deterministic = False
            some = [last[0], last[1], last[2]] if part == "weights" else [last[0][:2], last[1], last[2][:2]]
            right = of_cudnn(*how, *(each.double() for each in some))
            found = (compute(*how, *some) for compute in (of_cudnn, of_ours))
            errors = " error {:.1e} {:.1e}".format(*(float((x - right).norm() / right.norm()) for x in found))
        print(
            f"{dtype} {part:8}{name:26} cuDNN {rates[0]:6.1f} deterministic {rates[1]:6.1f} ours {ours:6.1f}"
            f" ratios {ours / rates[0]:.2f} {ours / rates[1]:.2f}{errors}",
            flush=True,
        )


def time_steps(name: str, dtype: str, steps: int, batch: int) -> None:
    """Print the seconds of a training step of a network, PyTorch's deterministic one and ours."""
    import torchvision  # type: ignore[import-not-found, unused-ignore]

    base = getattr(torchvision.models, name)().cuda()
    images = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device="cuda")
    times = []
    for ours in (False, True):
        model = copy.deepcopy(base).to(memory_format=torch.channels_last)
        if ours:
            model = convgrad.torch.replace(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        torch.use_deterministic_algorithms(not ours)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bf16"):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        begun = []
        for _ in range(steps + 1):
            torch.cuda.synchronize()
            begun.append(time.perf_counter())
            step()
        torch.cuda.synchronize()
        begun.append(time.perf_counter())
        times.append(statistics.median(last - first for first, last in pairwise(begun[1:])))
    torch.use_deterministic_algorithms(False)
    print(f"{name} {dtype} batch {batch}: PyTorch deterministic {times[0]:.4f} s, ours {times[1]:.4f} s", flush=True)


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    flags = parser.parse_args()
    if (refusal := refuse()) is not None:
        raise SystemExit(refusal)
    print(f"{describe()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", flush=True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    convgrad.torch.use(convgrad.local(device="cuda"))
    for dtype in flags.dtypes.split(","):
        a, b = (torch.randn(8192, 8192, device="cuda").to(DTYPES[dtype]) for _ in range(2))
        rate = 2 * 8192**3 / seconds(partial(torch.matmul, a, b)) / 1e12
        print(f"{dtype}: matrix products at {rate:.0f} TFLOP/s", flush=True)
        time_host(dtype)
        for name in flags.layers:
            time_layer(name, dtype)
    if flags.steps and find_spec("torchvision"):
        for network in ("resnet18", "resnet50"):
            for dtype in ("f32", "bf16"):
                time_steps(network, dtype, flags.steps, flags.batch)


if __name__ == "__main__":
    main()
