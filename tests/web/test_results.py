"""Numbers and results on the page, run in Node: rounding, maps that fill by tiles, and where an index is."""

from __future__ import annotations

from itertools import pairwise
from itertools import product as every
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.problems import random_case
from tests.web.answers import ask, layer_of
from verify.report import _maps
from verify.where import axis_names

DTYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding(dtype: str) -> None:
    """f32 numbers of every size are rounded to f16 and bf16, ties to even, as NumPy does it, and read back exactly."""
    rng = np.random.default_rng(0)
    halves = np.arange(0, 0x7C00, 7).astype(np.uint16).view(np.float16).astype(np.float32)
    ties = ((halves[:-1].astype(np.float64) + halves[1:]) / 2).astype(np.float32)
    bits = np.concatenate([rng.integers(0, 0x7F000000, 20000, np.uint32), halves.view(np.uint32), ties.view(np.uint32)])
    bits = np.concatenate([bits, bits | 0x80000000])
    with np.errstate(over="ignore"):
        rounded = bits.view(np.float32).astype(DTYPES[dtype])
    (answer,) = ask([{"ask": "rounded", "dtype": dtype, "bits": bits.tolist()}])
    assert answer["bits"] == rounded.view(np.uint16).tolist()
    assert answer["again"] == rounded.astype(np.float32).view(np.uint32).tolist()


def tiles_of(values: npt.NDArray[np.float32], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Cut a tensor into boxes, in any order."""
    cuts = [sorted({0, size // 2, int(rng.integers(size)), size}) for size in values.shape]
    boxes = list(every(*(list(pairwise(cut)) for cut in cuts)))
    rng.shuffle(boxes)
    return [
        {
            "offset": [int(first) for first, _ in box],
            "shape": [int(last - first) for first, last in box],
            "numbers": values[tuple(slice(*ends) for ends in box)].ravel().tolist(),
        }
        for box in boxes
    ]


@pytest.mark.parametrize("shape", [(5, 3, 2, 4), (130, 3, 1, 2)], ids=["small", "joined"])
@pytest.mark.parametrize(("op", "weights_format"), [("ConvolutionBackwardWeights", "OIX"), ("ConvTranspose", "IOX")])
def test_maps_fill_by_tiles(op: str, weights_format: str, shape: tuple[int, ...]) -> None:
    """Once all tiles have arrived, in any order, a map has the largest magnitudes as in reports, and their places."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal(shape).astype(np.float32)
    layer = {"op": op, "src": [9, 9], "data_format": "NCX", "weights_format": weights_format, "groups": 1}
    (maps,) = ask([{"ask": "filled", "layer": layer, "shape": shape, "tiles": tiles_of(values, rng)}])
    expected = _maps(problem(op, 2, "NCX", weights_format), np.abs(values), lambda: False)
    assert {found["name"] for found in maps} == set(expected)
    for found in maps:
        largest = np.array(expected[found["name"]]["values"], np.float32)
        assert found["cells"] == list(largest.shape)
        assert found["largest"] == largest.ravel().tolist()
        assert np.abs(values).ravel()[np.array(found["place"], int)].tolist() == found["largest"]
        assert found["arrived"] == found["whole"]


def problem(op: str, rank: int, data_format: str, weights_format: str) -> Any:
    """Return what maps depend on."""
    computes = {"BiasAddBackward": "diff_bias"}.get(op, "diff_weights" if op.endswith("BackwardWeights") else "dst")
    return SimpleNamespace(
        computes=computes, forward=computes == "dst", rank=rank, data_format=data_format, weights_format=weights_format
    )


def test_an_index_is_an_element() -> None:
    """Each index of a random layer's result leads to its element and back; its axes have the names of reports."""
    rng = np.random.default_rng(4)
    cases = [random_case(rng, small=True) for _ in range(200)]
    answers = ask([{"ask": "indexes", "layer": layer_of(case)} for case in cases])
    for case, answer in zip(cases, answers, strict=True):
        rank = len(case.src_spatial)
        assert answer["wrong"] == [], case
        assert answer["words"] == axis_names(problem(case.op, rank, case.data_format, case.weights_format)), case
