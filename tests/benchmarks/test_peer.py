"""The peer computes exactly what the kernels compute."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.accuracy import Reference, channels_last, grouped_result, make_inputs
from benchmarks.layers import LAYOUTS, OPERATIONS, Layer
from benchmarks.measure import TOLERANCE
from tests.problems import random_case

peer = pytest.importorskip("benchmarks.peer", reason="the bench extra is not installed", exc_type=ImportError)


@pytest.mark.parametrize("seed", range(60))
def test_torch_gives_the_reference(seed: int) -> None:
    """On any layer, in either layout, with uneven padding and output_padding too, PyTorch's result is near float64."""
    rng = np.random.default_rng(seed)
    case = next(c for c in iter(lambda: random_case(rng), None) if c.n and c.op in OPERATIONS)
    row = {key: getattr(case, key) for key in ("n", "src_channels", "dst_channels", "groups", "kernel", "strides")}
    row |= {key: getattr(case, key) for key in ("src_spatial", "dst_spatial", "dilations", "pads_begin")}
    layer = Layer(case.name, case.op, row)
    inputs = {"NCX": make_inputs(layer.problem("f32", "NCX"))}
    inputs["NXC"] = channels_last(layer.problem("f32", "NCX"), inputs["NCX"])
    exact = Reference(layer.problem("f32", "NCX"), inputs["NCX"])
    for layout in LAYOUTS:
        torch = peer.TorchPeer(layer.problem("f32", layout), inputs[layout], 1, "wall")
        _, called = torch.first()
        found = grouped_result(*torch.result(called))
        assert exact.error(found)["max"] < TOLERANCE["f32"]
