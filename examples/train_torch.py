"""Train a small PyTorch network twice: by PyTorch alone, and with convolutions and gradients from the service.

    python examples/train_torch.py [--url URL] [--epochs 4] [--forward service|torch] [--picture FILE]

The network, two convolutions with strides 1 and 2 and a transposed one, removes noise from the 1,797 digits of 8x8
pixels that come with scikit-learn. Both copies begin with the same weights and see the same batches, so their losses
differ by rounding alone. Draws both curves and their difference; exits with 1 if any loss differs by more than 0.1 %.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import convgrad
import convgrad.torch

BATCH = 64
TOLERANCE = 1e-3


def network() -> nn.Sequential:
    """Return the network: 8x8 to 4x4 and back."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding="same"),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(24, 12, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 1, 3, padding=1),
    )


def train(model: nn.Module, epochs: int) -> tuple[list[float], float]:
    """Train on noisy digits; return the loss of every step, and the seconds that they took."""
    draw = torch.Generator().manual_seed(1)
    images = torch.tensor(load_digits().images[:, None] / 16, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    losses, started = [], time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=draw).split(BATCH):
            clean = images[batch]
            noisy = clean + 0.3 * torch.randn(clean.shape, generator=draw)
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, time.perf_counter() - started


def draw_curves(curves: dict[str, list[float]], differences: list[float], picture: Path) -> None:
    """Plot the losses side by side, and beside them how much they differ."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, (name, losses) in zip((left, middle), curves.items(), strict=True):
        axes.semilogy(losses)
        axes.set(title=name, xlabel="step", ylim=(min(losses) / 1.2, max(losses) * 1.2))
    left.set_ylabel("mean squared error")
    right.plot(differences, color="tab:red", linewidth=0.8)
    right.set(title="difference, as a share of the loss", xlabel="step")
    right.ticklabel_format(axis="y", scilimits=(0, 0))
    figure.savefig(picture, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    """Train both copies, print and draw their losses."""
    parser = argparse.ArgumentParser(description="Train a PyTorch network with and without the service.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (%(default)s)")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for the service (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the digits (%(default)s)")
    parser.add_argument("--forward", choices=["service", "torch"], default="service", help="who computes outputs")
    parser.add_argument("--picture", type=Path, default=Path("train_torch.png"), help="where to draw the losses")
    given = parser.parse_args(arguments)
    with convgrad.Client(given.url) as client:
        try:
            client.wait_until_ready(timeout=given.wait)
        except convgrad.ConvgradError as error:
            print(f"no service at {given.url} ({error}); scripts/serve starts one", file=sys.stderr)
            return 2
        torch.manual_seed(0)
        alone = network()
        backend = convgrad.torch.Backend(client, forward=given.forward)
        served: Any = convgrad.torch.replace(copy.deepcopy(alone), backend)
        theirs, seconds = train(alone, given.epochs)
        ours, served_seconds = train(served, given.epochs)
    print(" step  PyTorch alone    with convgrad    difference")
    differences = [abs(one - other) / other for one, other in zip(ours, theirs, strict=True)]
    for step in range(0, len(ours), max(1, len(ours) // 10)):
        print(f"{step:5}  {theirs[step]:.10f}     {ours[step]:.10f}     {differences[step]:.1e}")
    print(f"{len(ours)} steps: {seconds:.1f} s by PyTorch alone, {served_seconds:.1f} s with the service")
    draw_curves({"PyTorch alone": theirs, "with convgrad": ours}, differences, given.picture)
    print(f"largest difference {max(differences):.1e}; curves in {given.picture}")
    return int(max(differences) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
