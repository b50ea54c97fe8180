"""Train a small JAX network twice: with `jax.lax` alone, and with convolutions and gradients from the service.

    python examples/train_jax.py [--url URL] [--epochs 4] [--picture FILE]

The network, two convolutions with strides 1 and 2 and a transposed one, channels-last, removes noise from the 1,797
digits of 8x8 pixels that come with scikit-learn. Each step is compiled by `jax.jit`. Both runs begin with the same
weights and see the same batches, so their losses differ by rounding alone. Draws both curves and their difference;
exits with 1 if any loss differs by more than 0.1 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import convgrad
import convgrad.jax

BATCH = 64
RATE = 2e-3
TOLERANCE = 1e-3
LAYOUT = ("NHWC", "HWIO", "NHWC")

Parameters = dict[str, Any]


def initial() -> Parameters:
    """Return the parameters of the network, 8x8 to 4x4 and back."""
    rng = np.random.default_rng(0)
    shapes = {"first": (3, 3, 1, 12), "down": (3, 3, 12, 24), "up": (3, 3, 24, 12), "last": (3, 3, 12, 1)}
    found = {}
    for name, shape in shapes.items():
        found[name] = jnp.asarray(rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[:3])), jnp.float32)
        found[f"{name}.bias"] = jnp.zeros(shape[3])
    return found


def apply(library: Any, parameters: Parameters, images: Any) -> Any:
    """Compute the network with the convolutions of `library`: `jax.lax` or `convgrad.jax`."""

    def conv(name: str, values: Any, stride: int = 1) -> Any:
        found = library.conv_general_dilated(
            values, parameters[name], (stride, stride), "SAME", dimension_numbers=LAYOUT
        )
        return found + parameters[f"{name}.bias"]

    values = jax.nn.relu(conv("first", images))
    values = jax.nn.relu(conv("down", values, 2))
    up = library.conv_transpose(values, parameters["up"], (2, 2), "SAME", dimension_numbers=LAYOUT)
    return conv("last", jax.nn.relu(up + parameters["up.bias"]))


def train(library: Any, epochs: int) -> tuple[list[float], float]:
    """Train on noisy digits with Adam; return the loss of every step, and the seconds that they took."""

    def loss_of(parameters: Parameters, noisy: Any, clean: Any) -> Any:
        return jnp.square(apply(library, parameters, noisy) - clean).mean()

    @jax.jit  # type: ignore[untyped-decorator] # JAX need not be installed
    def step(parameters: Parameters, moments: Any, count: Any, noisy: Any, clean: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, noisy, clean)
        first, second = (
            jax.tree.map(lambda old, new, kept=kept, power=power: kept * old + (1 - kept) * new**power, old, gradients)
            for old, kept, power in zip(moments, (0.9, 0.999), (1, 2), strict=True)
        )
        rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        moved = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), parameters, first, second)
        return loss, moved, (first, second)

    rng = np.random.default_rng(1)
    images = (load_digits().images[..., None] / 16).astype(np.float32)
    parameters = initial()
    moments = tuple(jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
    losses: list[float] = []
    started = time.perf_counter()
    for _ in range(epochs):
        order = rng.permutation(len(images))[: len(images) // BATCH * BATCH]
        for batch in order.reshape(-1, BATCH):
            clean = images[batch]
            noisy = clean + 0.3 * rng.standard_normal(clean.shape, dtype=np.float32)
            loss, parameters, moments = step(parameters, moments, len(losses) + 1, noisy, clean)
            losses.append(float(loss))
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
    """Train with both libraries, print and draw their losses."""
    parser = argparse.ArgumentParser(description="Train a JAX network with and without the service.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (%(default)s)")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for the service (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the digits (%(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("train_jax.png"), help="where to draw the losses")
    given = parser.parse_args(arguments)
    with convgrad.Client(given.url) as client:
        try:
            client.wait_until_ready(timeout=given.wait)
        except convgrad.ConvgradError as error:
            print(f"no service at {given.url} ({error}); scripts/serve starts one", file=sys.stderr)
            return 2
        convgrad.jax.use(client)
        theirs, seconds = train(jax.lax, given.epochs)
        ours, served_seconds = train(convgrad.jax, given.epochs)
    print(" step  JAX alone        with convgrad    difference")
    differences = [abs(one - other) / other for one, other in zip(ours, theirs, strict=True)]
    for step in range(0, len(ours), max(1, len(ours) // 10)):
        print(f"{step:5}  {theirs[step]:.10f}     {ours[step]:.10f}     {differences[step]:.1e}")
    print(f"{len(ours)} steps: {seconds:.1f} s by JAX alone, {served_seconds:.1f} s with the service")
    draw_curves({"JAX alone": theirs, "with convgrad": ours}, differences, given.picture)
    print(f"largest difference {max(differences):.1e}; curves in {given.picture}")
    return int(max(differences) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
