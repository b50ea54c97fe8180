"""Time training steps by PyTorch alone and through `convgrad.torch`, by direct sums and `auto`, and compare losses.

    python -m benchmarks.training [--network vgg|resnet|small] [--steps 8] [--batch 8] [--size 64] [--channels-last]
    python -m benchmarks.training --network vgg --layers
    python -m benchmarks.training --network small --steps 150 --batch 16 --size 32 --digits 6 --picture FILE

All copies of a network begin with the same weights and take turns, step by step, on the same batches: noisy copies of
ten pictures, to be told apart. PyTorch and `convgrad.local()` compute here, with a thread for each processor.
Prints the median seconds of a step, without the first of each copy, which plans and allocates, and the largest
difference of the losses from PyTorch's, as a share of them. `--layers` adds where the time goes: milliseconds of each
convolution of a step, forward and backward (PyTorch's by its profiler). `--digits N` also trains the network of
examples/train_digits.py for N epochs, with direct sums and with `auto`.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.profiler import ProfilerActivity, profile

import convgrad
import convgrad.torch
from benchmarks.machine import describe_machine
from examples import train_digits

CLASSES = 10
ALGORITHMS: tuple[train_digits.Algorithm, ...] = ("direct", "auto")


def vgg() -> nn.Module:
    """Return the convolutions of VGG-16 up to 512 channels, with batch norm and one linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Block(nn.Module):
    """The basic block of ResNet: two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        found: torch.Tensor = torch.relu(self.path(src) + self.shortcut(src))
        return found


def resnet() -> nn.Module:
    """Return ResNet-18 with the first layer for small images: 3x3, stride 1, no pooling."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(channels, width, stride), Block(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def small() -> nn.Module:
    """Return a network of three convolutions."""
    layers: list[nn.Module] = []
    for channels, width in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


NETWORKS = {"vgg": vgg, "resnet": resnet, "small": small}


def batches(count: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield images and their classes without end."""
    draw = torch.Generator().manual_seed(1)
    pictures = torch.randn(CLASSES, 3, size, size, generator=draw)
    while True:
        labels = torch.randint(CLASSES, (count,), generator=draw)
        yield pictures[labels] + torch.randn(count, 3, size, size, generator=draw), labels


class Timed:
    """A client that notes the seconds of each convolution, by forward or backward, and by shapes."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.seconds: Any = Counter()

    def run(self, op: str, inputs: Any, *others: Any, **options: Any) -> Any:
        """Compute one output."""
        return self._timed(self._client.run, op, inputs, *others, **options)

    def run_outputs(self, op: str, inputs: Any, *others: Any, **options: Any) -> Any:
        """Compute several outputs."""
        return self._timed(self._client.run_outputs, op, inputs, *others, **options)

    def _timed(self, method: Any, op: str, inputs: Any, *others: Any, **options: Any) -> Any:
        started = time.perf_counter()
        found = method(op, inputs, *others, **options)
        weights = inputs["weights"].shape if "weights" in inputs else inputs["weights_shape"]
        phase = "forward" if op == "Convolution" else "backward"
        self.seconds[phase, tuple(inputs["src"].shape), tuple(weights)] += time.perf_counter() - started
        return found


class Contender:
    """A copy of a network with its optimizer, and the seconds and losses of its steps."""

    def __init__(self, model: nn.Module, timed: Timed | None = None) -> None:
        self.model = model
        self.timed = timed
        self.optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on a batch."""
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())


def contenders(client: Any, network: str) -> dict[str, Contender]:
    """Return the copies of a network by who computes their convolutions."""
    torch.manual_seed(0)
    alone = NETWORKS[network]()
    found = {"PyTorch": Contender(copy.deepcopy(alone))}
    for algorithm in ALGORITHMS:
        timed: Any = Timed(client)
        backend = convgrad.torch.Backend(timed, algorithm=algorithm)
        found[algorithm] = Contender(convgrad.torch.replace(copy.deepcopy(alone), backend), timed)
    return found


def layers_of_torch(alone: Contender, images: torch.Tensor, labels: torch.Tensor) -> Any:
    """Take a step of PyTorch's under its profiler; return the seconds of each convolution."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as taken:
        alone.step(images, labels)
    found: Any = Counter()
    for event in taken.key_averages(group_by_input_shape=True):
        phase = {"aten::mkldnn_convolution": "forward", "aten::convolution_backward": "backward"}.get(event.key)
        if phase is not None:
            src, weights = [tuple(shape) for shape in event.input_shapes][phase == "backward" :][:2]
            found[phase, src, weights] += event.cpu_time_total / 1e6
    return found


def print_layers(copies: dict[str, Contender], peer: Any, steps: int) -> None:
    """Print a table of milliseconds of a step: each convolution, and what is between them."""
    columns = [peer, *(each.timed.seconds for each in copies.values() if each.timed)]
    print("| | src | weights |", *(f" {name} |" for name in copies), sep="")
    print("|---|---|---|", "---:|" * len(copies), sep="")
    for row in sorted(peer, key=lambda row: -peer[row]):
        phase, *shapes = row
        texts = (" x ".join(map(str, shape)) for shape in shapes)
        print("|", phase, "|", " | ".join(texts), "|", *(f"{1000 * each[row] / steps:.2f} |" for each in columns))
    sums = [1000 * each.total() / steps for each in columns]
    wholes = [1000 * statistics.median(each.seconds[1:]) for each in copies.values()]
    print("| all convolutions | | |", *(f"{each:.0f} |" for each in sums))
    print("| the rest of the step | | |", *(f"{whole - each:.0f} |" for whole, each in zip(wholes, sums, strict=True)))


def differences(copies: dict[str, Contender]) -> Iterator[str]:
    """Yield the largest difference of each copy's losses from PyTorch's."""
    right = copies["PyTorch"].losses
    for name in ALGORITHMS:
        largest = max(abs(loss - other) / other for loss, other in zip(copies[name].losses, right, strict=True))
        yield f"{name} differs by {largest:.1e}"


def draw_losses(losses: dict[str, dict[str, list[float]]], picture: Path) -> None:
    """Plot the losses of each network, all copies in one picture."""
    figure = Figure(figsize=(5 * len(losses), 3.2), layout="constrained")
    for axes, (network, curves) in zip(figure.subplots(1, len(losses), squeeze=False)[0], losses.items(), strict=True):
        for (name, curve), style in zip(curves.items(), ("-", "--", ":"), strict=False):
            axes.semilogy(curve, style, label=name)
        axes.set(title=network, xlabel="step", ylabel="cross-entropy")
        axes.legend()
    figure.savefig(picture)


def main(arguments: list[str] | None = None) -> None:
    """Train, print and draw."""
    parser = argparse.ArgumentParser(description="Time training steps through convgrad.torch.")
    parser.add_argument("--network", choices=NETWORKS, action="append", help="default: vgg and resnet")
    parser.add_argument("--steps", type=int, default=8, help="steps of each copy (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="images of a batch (%(default)s)")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side (%(default)s)")
    parser.add_argument("--channels-last", action="store_true", help="images and weights with the channels last")
    parser.add_argument("--layers", action="store_true", help="where the time goes")
    parser.add_argument("--digits", type=int, default=0, help="epochs of examples/train_digits.py (%(default)s)")
    parser.add_argument("--picture", type=Path, help="draw the losses")
    given = parser.parse_args(arguments)
    processors = len(os.sched_getaffinity(0))
    torch.set_num_threads(processors)
    print(describe_machine()["cpu"]["model"], f"{processors} processors", f"{given.batch} images", sep=", ")
    losses: dict[str, dict[str, list[float]]] = {}
    with convgrad.local() as client:
        for network in given.network or ("vgg", "resnet"):
            copies, data, peer = contenders(client, network), batches(given.batch, given.size), Counter[Any]()
            layout = torch.channels_last if given.channels_last else torch.contiguous_format
            for each in copies.values():
                each.model.to(memory_format=layout)
            profiled = Contender(copy.deepcopy(copies["PyTorch"].model))
            for number, (images, labels) in zip(range(given.steps), data, strict=False):
                images = images.contiguous(memory_format=layout)
                for each in copies.values():
                    each.step(images, labels)
                    if each.timed and not number:
                        each.timed.seconds.clear()
                if given.layers and number:
                    peer += layers_of_torch(profiled, images, labels)
            losses[network] = {name: each.losses for name, each in copies.items()}
            medians = {name: statistics.median(each.seconds[1:]) for name, each in copies.items()}
            print(network, *(f"{name} {seconds:.3f} s" for name, seconds in medians.items()), sep="  ")
            if given.layers:
                print_layers(copies, peer, given.steps - 1)
            print(f"  auto takes {medians['auto'] / medians['direct']:.2f} of direct's time;", *differences(copies))
        if given.digits:
            losses["digits"] = {name: train_digits.train(client, given.digits, name)[0] for name in ALGORITHMS}
    if given.picture:
        draw_losses(losses, given.picture)


if __name__ == "__main__":
    main()
