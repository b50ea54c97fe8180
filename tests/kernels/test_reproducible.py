"""The reference: sums in float64 that have the same bits on every processor that kernels are compiled for."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from kernels import ConvProblem, plan
from kernels.reference import REFERENCE, sum_products
from kernels.target import target
from tests.kernels.harness import stored
from tests.naive import round_to

pytestmark = [pytest.mark.path, pytest.mark.skipif(not target().compiles, reason="NumPy's BLAS adds")]

LAYER = ConvProblem(
    op="ConvolutionBackwardWeights", dtype="f32", n=2, src_channels=24, dst_channels=40, groups=2, src_spatial=(19, 23),
    dst_spatial=(10, 12), kernel=(3, 3), strides=(2, 2), dilations=(1, 1), pads_begin=(1, 1), data_format="NCX",
    weights_format="OIX",
)  # fmt: skip
TURNED = replace(LAYER, op="ConvTranspose", src_spatial=(10, 12), dst_spatial=(19, 23), bias=True)

BIAS = ConvProblem.of_bias(op="BiasAddBackward", dtype="f32", n=3, data_format="NCX", channels=5, spatial=(40, 50))


def _sums(problem: ConvProblem) -> bytes:
    """Return the float64 sums of a problem before they are rounded, from numbers that never change."""
    rng = np.random.RandomState(5)
    inputs = [stored(round_to(problem.dtype, rng.standard_normal(shape))) for shape in problem.input_shapes]
    units = plan(problem, reference=True).units
    found = [REFERENCE.values(problem, unit, inputs, lambda: False) for unit in units]
    return b"".join(np.ascontiguousarray(each).tobytes() for each in found if each is not None)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (LAYER, "eccb6d50f8eb"),
        (replace(LAYER, dtype="bf16", data_format="NXC"), "c45a8194faa9"),
        (replace(LAYER, dtype="f16", groups=8), "3449800abe42"),
        (replace(TURNED, op="ConvTransposeBackwardWeights", bias=False), "0a9b4d07f895"),
        (TURNED, "2e32ec583d5d"),
        (replace(LAYER, op="Convolution", bias=True), "d98cdd3b79e5"),
        (replace(LAYER, op="Convolution", groups=24, dst_channels=24), "c646a091eb72"),
        (
            ConvProblem.of_bias(
                op="BiasAddBackward", dtype="f32", n=3, data_format="NCX", channels=5, spatial=(40, 50)
            ),
            "93e36e8ccd71",
        ),
    ],
)
def test_one_order_of_sums(problem: ConvProblem, expected: str) -> None:
    """Sums of every operation have the same bits on every processor."""
    assert sha256(_sums(problem)).hexdigest()[:12] == expected


@pytest.mark.parametrize("terms", [2, 255, 256, 257, 600])
@pytest.mark.parametrize(("rows", "columns"), [(3, 2), (6, 16), (7, 17), (13, 40)])
def test_each_sum_is_one_chain(rows: int, columns: int, terms: int) -> None:
    """Terms are added one after another, whatever the strides of the factors, and nothing else is written."""
    rng = np.random.default_rng(terms)
    values = (rng.standard_normal((2, count, terms)).astype(np.float32).astype(np.float64) for count in (rows, columns))
    a, b = values
    chain = np.zeros((2, rows, columns))
    for term in range(terms):
        chain += a[:, :, term, None] * b[:, None, :, term]
    turned = (np.ascontiguousarray(each.transpose(0, 2, 1)).transpose(0, 2, 1) for each in (a, b))
    for found in (sum_products(a, b), sum_products(*turned), sum_products(a[:, ::-1], b)[:, ::-1]):
        assert found.tobytes() == chain.tobytes()


def test_nan_has_one_sign() -> None:
    """NaN that a processor makes has the bits of NumPy's."""
    problem = replace(LAYER, groups=1, n=1)
    inputs: list[Any] = [np.full(shape, np.inf, np.float32) for shape in problem.input_shapes]
    inputs[1][:, :, 0] = -np.inf
    chosen, output = plan(problem, reference=True), np.empty(problem.output_shape, np.float32)
    for unit in chosen.units:
        assert REFERENCE.run(problem, unit, inputs, output, None, lambda: False)
    assert np.isnan(output).any()
    assert set(output[np.isnan(output)].view(np.uint32)) == {0x7FC00000}
