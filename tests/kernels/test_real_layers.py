"""Real layers, from the same file that the benchmarks read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels import plan
from tests.kernels.harness import check, problem_of
from tests.problems import Case, fit, real_layers

MACS = 6_000_000
LAYERS = {case.name: case for case in real_layers()}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_has_a_compiled_kernel(name: str) -> None:
    """Every layer, at its published size and in every dtype, is planned on a compiled kernel."""
    for dtype in ("f32", "f16", "bf16"):
        chosen = plan(problem_of(replace(LAYERS[name], dtype=dtype)), workers=2)
        assert chosen.kernel != "reference_f64"
        assert sum(unit.macs for unit in chosen.units) <= chosen.macs


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    """Every layer's geometry, with one image and as many channels as time allows, matches the oracle's bits."""
    case: Case = fit(replace(LAYERS[name], n=1), MACS)
    check(replace(case, data_format="NXC", weights_format="XIO"), workers=2)
    check(replace(case, dtype="bf16"), workers=1)
