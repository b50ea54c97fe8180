"""An operation and its two gradients are one trilinear form: <conv(x, w), y> = <x, data(y, w)> = <w, weights(x, y)>."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.harness import Tensor, compute
from tests.problems import Case, random_case

FAMILIES = ("Convolution", "ConvTranspose")


def _forward(case: Case) -> Case:
    """Return a forward case of the same family as a random one, in f32 and without a bias."""
    family = case.op.partition("Backward")[0]
    return replace(case, op=family, dtype="f32", bias=False)


def _product(a: Tensor, b: Tensor) -> int:
    return int((a.astype(np.int64) * b.astype(np.int64)).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_adjoint(family: str) -> None:
    """With small integers all three products are exact, so they are equal, and rarely zero."""
    rng = np.random.default_rng(41)
    compared = other = 0
    while compared < 60:
        case = _forward(random_case(rng, macs=40_000))
        if case.op != family or case.n == 0:
            continue
        x, w, y = (
            rng.integers(-3, 4, shape).astype(np.float32)
            for shape in (case.src_shape, case.weights_shape, case.dst_shape)
        )
        dst = compute(case, {"src": x, "weights": w})
        diff_src = compute(replace(case, op=f"{family}BackwardData"), {"diff_dst": y, "weights": w})
        diff_weights = compute(replace(case, op=f"{family}BackwardWeights"), {"src": x, "diff_dst": y})
        found = _product(dst, y)
        assert found == _product(x, diff_src) == _product(w, diff_weights), case
        compared, other = compared + 1, other + (found != 0)
    assert other > 40
