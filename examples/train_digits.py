"""Train a small convolutional network on handwritten digits, with convolutions and gradients from the service.

    python examples/train_digits.py [--url URL] [--epochs 15] [--algorithm auto] [--picture FILE]

The network is plain NumPy: two 3x3 convolutions, ReLU, one dense layer, softmax, Adam. A running convgrad service
computes the convolutions (`Convolution`) and, in one call for each layer, the gradients of its filters, bias and input
(`ConvolutionBackwardWeights` with several outputs). The data are the 1,797 digits of 8x8 pixels that come with
scikit-learn. Writes the loss curve as a PNG file; exits with 1 unless the test accuracy exceeds 95 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import convgrad

Array = npt.NDArray[np.float32]
Parameters = dict[str, Array]
Algorithm = Literal["direct", "auto"]

BATCH = 64


class Convolution:
    """A 3x3 convolution with padding 1 and ReLU, channels last; the service computes it, forward and backward."""

    def __init__(self, client: convgrad.Client, name: str, algorithm: Algorithm) -> None:
        self.client, self.name, self.algorithm = client, name, algorithm
        self.attributes: dict[str, Any] = {
            "strides": (1, 1),
            "dilations": (1, 1),
            "pads_begin": (1, 1),
            "pads_end": (1, 1),
            "data_format": "NXC",
            "weights_format": "XIO",
        }

    def forward(self, parameters: Parameters, src: Array) -> Array:
        """Compute dst = relu(conv(src, weights) + bias); stores what the backward pass needs."""
        self.src, self.weights = src, parameters[self.name]
        dst = self.client.convolution(src, self.weights, parameters[self.name + ".bias"], **self.attributes)
        relu: Array = np.maximum(dst, 0)
        self.dst = relu
        return relu

    def backward(self, gradients: Parameters, diff_dst: Array, *, first: bool = False) -> Array | None:
        """Add the gradients of filters and bias to `gradients`; return that of src unless `first`."""
        diff_dst = np.where(self.dst > 0, diff_dst, 0)
        wanted = ["diff_weights", "diff_bias", *([] if first else ["diff_src"])]
        inputs = {"src": self.src, "diff_dst": diff_dst, "weights": self.weights}
        if first:
            del inputs["weights"]
        shaped = {**self.attributes, "weights_shape": self.weights.shape}
        found = self.client.run_detailed(
            "ConvolutionBackwardWeights", inputs, shaped, outputs=wanted, algorithm=self.algorithm
        ).outputs
        gradients[self.name], gradients[self.name + ".bias"] = found["diff_weights"], found["diff_bias"]
        return found.get("diff_src")


class Network:
    """8x8x1 -> conv 32 -> conv 32 -> dense 10."""

    def __init__(self, client: convgrad.Client, rng: np.random.Generator, algorithm: Algorithm) -> None:
        self.first = Convolution(client, "conv1", algorithm)
        self.second = Convolution(client, "conv2", algorithm)
        self.parameters = {
            "conv1": _normal(rng, (3, 3, 1, 32), fan_in=9),
            "conv1.bias": np.zeros(32, np.float32),
            "conv2": _normal(rng, (3, 3, 32, 32), fan_in=288),
            "conv2.bias": np.zeros(32, np.float32),
            "dense": _normal(rng, (2048, 10), fan_in=2048),
            "dense.bias": np.zeros(10, np.float32),
        }

    def logits(self, images: Array) -> Array:
        """Compute the ten scores of each image."""
        features = self.second.forward(self.parameters, self.first.forward(self.parameters, images))
        self.features: Array = features.reshape(len(images), -1)
        scores: Array = self.features @ self.parameters["dense"] + self.parameters["dense.bias"]
        return scores

    def loss_and_gradients(self, images: Array, labels: npt.NDArray[np.int64]) -> tuple[float, Parameters]:
        """Compute the cross-entropy of a batch and its gradient for every parameter."""
        logits = self.logits(images)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        rows = np.arange(len(labels))
        loss = float(-np.log(shares[rows, labels] + 1e-12).mean())

        shares[rows, labels] -= 1
        shares /= len(labels)
        gradients = {"dense": self.features.T @ shares, "dense.bias": shares.sum(0)}
        diff_features = (shares @ self.parameters["dense"].T).reshape(self.second.dst.shape)
        diff_first = self.second.backward(gradients, diff_features)
        assert diff_first is not None
        self.first.backward(gradients, diff_first, first=True)
        return loss, gradients


class Adam:
    """Adam (Kingma & Ba, 2015) over a dictionary of parameters."""

    def __init__(self, parameters: Parameters, rate: float = 2e-3) -> None:
        self.parameters, self.rate, self.steps = parameters, rate, 0
        self.mean = {name: np.zeros_like(value) for name, value in parameters.items()}
        self.square = {name: np.zeros_like(value) for name, value in parameters.items()}

    def step(self, gradients: Parameters) -> None:
        """Move every parameter in place."""
        self.steps += 1
        rate = self.rate * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for name, gradient in gradients.items():
            self.mean[name] += 0.1 * (gradient - self.mean[name])
            self.square[name] += 0.001 * (gradient**2 - self.square[name])
            self.parameters[name] -= rate * self.mean[name] / (np.sqrt(self.square[name]) + 1e-8)


def main() -> int:
    """Train, print the accuracy, plot the loss."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits, with convolutions from the service.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (%(default)s)")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for the service (%(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the digits (%(default)s)")
    parser.add_argument("--algorithm", choices=("direct", "auto"), default="direct", help="how gradients are summed")
    parser.add_argument("--picture", type=Path, default=Path("train_digits.png"), help="where to write the loss curve")
    arguments = parser.parse_args()
    with convgrad.Client(arguments.url) as client:
        try:
            client.wait_until_ready(timeout=arguments.wait)
        except convgrad.ConvgradError as error:
            print(f"no service at {arguments.url} ({error}); scripts/serve starts one", file=sys.stderr)
            return 2
        losses, accuracies = train(client, arguments.epochs, arguments.algorithm)
    draw(losses, accuracies, arguments.picture)
    print(f"test accuracy {accuracies[-1]:.1%}; loss curve in {arguments.picture}")
    return int(accuracies[-1] <= 0.95)


def train(client: convgrad.Client, epochs: int, algorithm: Algorithm) -> tuple[list[float], list[float]]:
    """Train on four fifths of the digits; return every batch's loss and every epoch's test accuracy."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    rng = np.random.default_rng(0)
    network = Network(client, rng, algorithm)
    check_gradient(network, train_x[:BATCH], train_y[:BATCH])
    optimiser = Adam(network.parameters)
    losses: list[float] = []
    accuracies: list[float] = []
    started = time.perf_counter()
    for epoch in range(epochs):
        batches = list(shuffled_batches(rng, len(train_x)))
        for done, batch in enumerate(batches, 1):
            loss, gradients = network.loss_and_gradients(train_x[batch], train_y[batch])
            optimiser.step(gradients)
            losses.append(loss)
            show_progress(epoch * len(batches) + done, epochs * len(batches), loss, time.perf_counter() - started)
        accuracies.append(float((network.logits(test_x).argmax(1) == test_y).mean()))
    seconds = time.perf_counter() - started
    print(f"{len(losses)} steps in {seconds:.1f} s; {len(train_x)} training and {len(test_x)} test digits")
    return losses, accuracies


def check_gradient(network: Network, images: Array, labels: npt.NDArray[np.int64]) -> None:
    """Compare the service's gradients of the filters with central differences of the loss."""
    _, gradients = network.loss_and_gradients(images, labels)
    for name in ("conv1", "conv2"):
        weights, gradient = network.parameters[name], gradients[name]
        at = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        original, step = weights[at], np.float32(1e-2)
        weights[at] = original + step
        above, _ = network.loss_and_gradients(images, labels)
        weights[at] = original - step
        below, _ = network.loss_and_gradients(images, labels)
        weights[at] = original
        slope = (above - below) / (2 * float(step))
        print(f"{name}: d loss / d filter = {gradient[at]:+.5f}, numerically {slope:+.5f}")


def shuffled_batches(rng: np.random.Generator, count: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the indexes of each batch of one epoch."""
    order = rng.permutation(count)
    for start in range(0, count, BATCH):
        yield order[start : start + BATCH]


def show_progress(done: int, total: int, loss: float, seconds: float) -> None:
    """Show a progress bar if standard error is a terminal."""
    if sys.stderr.isatty():
        bar = "#" * (40 * done // total)
        end = "\n" if done == total else ""
        text = f"\r[{bar:40}] {done}/{total}  loss {loss:.4f}  {seconds:.0f} s "
        print(text, end=end, file=sys.stderr, flush=True)


def draw(losses: list[float], accuracies: list[float], picture: Path) -> None:
    """Plot the loss of every batch and the test accuracy of every epoch."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(losses, color="tab:blue", alpha=0.35, linewidth=1)
    window = min(20, len(losses))
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    axes.semilogy(np.arange(window - 1, len(losses)), smooth, color="tab:blue", label="training loss")
    axes.set(xlabel="step", ylabel="cross-entropy", title="Digits: convolutions and gradients from the service")
    right = axes.twinx()
    ends = np.arange(1, len(accuracies) + 1) * len(losses) / len(accuracies)
    right.plot(ends, [100 * value for value in accuracies], color="tab:orange", marker=".", label="test accuracy")
    right.set(ylabel="test accuracy, %")
    figure.legend(loc="outside lower center", ncols=2)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> Array:
    values: Array = (rng.standard_normal(shape) * np.sqrt(2 / fan_in)).astype(np.float32)
    return values


if __name__ == "__main__":
    sys.exit(main())
