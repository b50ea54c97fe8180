"""Compute real layers on a running service and compare every gradient with float64.

    python examples/real_layers.py [--url URL] [--batch 2] [--dtype f32] [--model WaveNet] [--all]

The shapes come from `benchmarks/shapes.json`; the data is random and the batch small. Every gradient is
computed by the service's fast kernel and by its float64 reference (`reference=True`), and its middle kernel
position also locally in NumPy. Errors are relative to the largest element. Exits with 1 if one is too large.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import convgrad

Array = np.ndarray[Any, np.dtype[Any]]

LAYERS = Path(__file__).parent.parent / "benchmarks" / "shapes.json"
MODELS = {  # prefixes of the layer names of each model
    "ResNet-50": ("resnet_50:conv1", "resnet_50:res2a", "resnet_50:res3a_branch2b", "resnet_50:res4a"),
    "DCGAN generator": ("dcgan:",),
    "U-Net": ("unet:", "3d_unet:conv_7"),
    "WaveNet": ("wavenet:",),
}
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# f16 and bf16 results are rounded once, at the end: half a unit in the last place
ALLOWED = {"f32": 2e-5, "f16": 1.01 * 2.0**-11, "bf16": 1.01 * 2.0**-8}
ROW = "{:36} {:>18} {:>18} {:>16} {:>6} {:>10} {:>9} {:>9} {:>9}"
HEAD = ("layer", "src", "diff_dst", "weights", "GMAC", "compute ms", "total ms", "error", "in NumPy")


def main() -> int:
    """Run the layers and print the table."""
    arguments = parse_arguments()
    worst = 0.0
    with convgrad.Client(arguments.url, timeout=600) as client:
        try:
            client.wait_until_ready(timeout=arguments.wait)
        except convgrad.ConvgradError as error:
            print(f"no service at {arguments.url} ({error}); scripts/serve starts one", file=sys.stderr)
            return 2
        print(ROW.format(*HEAD))
        for name, layer in chosen_layers(arguments.model, everything=arguments.all):
            columns, error_of_layer = run(client, layer, arguments.batch, arguments.dtype)
            print(ROW.format(name, *columns), flush=True)
            worst = max(worst, error_of_layer)
    allowed = ALLOWED[arguments.dtype]
    print(f"largest error {worst:.1e} (allowed {allowed:.1e})")
    return int(worst > allowed)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compute real layers on a running service.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="batch size, at most the published one (%(default)s)")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for the service (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="dtype of the tensors (%(default)s)")
    parser.add_argument("--model", choices=MODELS, help="only the layers of this model")
    parser.add_argument("--all", action="store_true", help="every layer in the file; takes some minutes")
    return parser.parse_args()


def chosen_layers(only: str | None, *, everything: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the selected layers with the names to print."""
    layers = json.loads(LAYERS.read_text())
    if everything:
        yield from ((layer["name"], layer) for layer in layers)
        return
    for model, starts in MODELS.items():
        for layer in layers:
            if layer["name"].startswith(starts) and only in {None, model}:
                yield f"{model} {layer['name'].split(':')[1]}", layer


def run(client: convgrad.Client, layer: dict[str, Any], batch: int, dtype: str) -> tuple[list[str], float]:
    """Compute one layer's filter gradient; return its table columns and the larger of its errors."""
    inputs, attributes = call_of(layer, min(batch, layer["n"]), dtype)
    started = time.perf_counter()
    result = client.run_detailed(layer["op"], inputs, attributes)
    total_ms = 1e3 * (time.perf_counter() - started)
    got = result.array.astype(np.float64)

    # the reference gets the same values in f32, which represents them exactly and rounds the result less
    wide = {name: tensor.astype(np.float32) for name, tensor in inputs.items()}
    exact = client.run(layer["op"], wide, attributes, reference=True).astype(np.float64)
    largest = np.abs(exact).max()
    error = float(np.abs(got - exact).max() / largest)
    tap, middle = middle_tap(layer, wide["src"], wide["diff_dst"])
    error_in_numpy = float(np.abs(got[last_axes(tap)] - middle).max() / largest)

    shapes = [inputs["src"].shape, inputs["diff_dst"].shape, got.shape]
    columns = ["x".join(map(str, shape)) for shape in shapes]
    columns += [f"{result.stats['gmac']:.3f}", f"{result.stats['compute_ms']:.1f}", f"{total_ms:.0f}"]
    columns += [f"{error:.1e}", f"{error_in_numpy:.1e}"]
    return columns, max(error, error_in_numpy)


def call_of(layer: dict[str, Any], n: int, dtype: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Make random channels-first inputs for a layer, and its attributes."""
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.standard_normal((n, layer[f"{side}_channels"], *layer[f"{side}_spatial"])).astype(DTYPES[dtype])
        for name, side in (("src", "src"), ("diff_dst", "dst"))
    }
    lists = ["strides", "dilations", "pads_begin", "pads_end"]
    if layer["op"].startswith("ConvTranspose"):
        channels = layer["src_channels"], layer["dst_channels"] // layer["groups"]
        weights_format = "IOX"
        lists.append("output_padding")
    else:
        channels = layer["dst_channels"], layer["src_channels"] // layer["groups"]
        weights_format = "OIX"
    attributes = {name: layer[name] for name in lists} | {
        "groups": layer["groups"],
        "data_format": "NCX",
        "weights_format": weights_format,
        "weights_shape": [*channels, *layer["kernel"]],
    }
    return inputs, attributes


def middle_tap(layer: dict[str, Any], src: Array, diff_dst: Array) -> tuple[tuple[int, ...], Array]:
    """Compute one kernel position of the gradient in float64: the product of two shifted sets of images."""
    wide, narrow = (diff_dst, src) if layer["op"].startswith("ConvTranspose") else (src, diff_dst)
    tap = tuple(size // 2 for size in layer["kernel"])
    at_wide, at_narrow = [], []
    for axis, k in enumerate(tap):
        stride = layer["strides"][axis]
        shift = k * layer["dilations"][axis] - layer["pads_begin"][axis]
        meets = shift + np.arange(narrow.shape[axis + 2]) * stride
        inside = np.flatnonzero((meets >= 0) & (meets < wide.shape[axis + 2]))
        at_narrow.append(slice(int(inside[0]), int(inside[-1]) + 1))
        at_wide.append(slice(int(meets[inside[0]]), int(meets[inside[-1]]) + 1, stride))
    groups = layer["groups"]
    rows, columns = (
        np.moveaxis(tensor[last_axes(at)].astype(np.float64), 1, 0).reshape(groups, tensor.shape[1] // groups, -1)
        for tensor, at in ((narrow, at_narrow), (wide, at_wide))
    )
    product = rows @ columns.transpose(0, 2, 1)
    return tap, product.reshape(-1, product.shape[2])


def last_axes(index: Sequence[Any]) -> tuple[Any, ...]:
    """Index the last axes and keep the others whole."""
    return (Ellipsis, *index)


if __name__ == "__main__":
    sys.exit(main())
