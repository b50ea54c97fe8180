"""Fast verification of tensors of PyTorch, which are projected where they are: on a GPU, here on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.options import Options
from engine.process import Engine, metas_of
from engine.threads import Stop
from tests.kernels.harness import compute, problem_of, stored
from tests.problems import WITH_WEIGHTS, Case, Tensor
from verify.projections import Projection

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/test-gpu has it")

LAYER = Case(
    n=3, src_channels=12, dst_channels=20, src_spatial=(12, 10), dst_spatial=(12, 10), kernel=(3, 3), pads_begin=(1, 1),
    pads_end=(1, 1),
)  # fmt: skip
KINDS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def tensors(case: Case, given: dict[str, Tensor]) -> dict[str, Any]:
    """Return the tensors of PyTorch with the content of those that have images."""
    found = {name: torch.from_numpy(stored(each)).view(KINDS[case.dtype]) for name, each in given.items()}
    return {name: each for name, each in found.items() if "weights" not in name}


def layer(op: str, **changes: Any) -> Case:
    """Return an operation on the layer."""
    return replace(LAYER, op=op, groups_axis="O" if op.startswith("ConvTranspose") else "I", **changes)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("op", WITH_WEIGHTS)
def test_projections_are_those_of_arrays(op: str, dtype: str) -> None:
    """Sums of projected tensors are those of arrays: of integers the same, else within roundings of float64."""
    for data_format, groups in (("NCX", 1), ("NXC", 2)):
        case = layer(op, dtype=dtype, data_format=data_format, groups=groups)
        projection = Projection(problem_of(case), 7)
        for exact, inputs in ((True, case.inputs()), (False, case.floats())):
            given = {**inputs, "result": compute(case, inputs)}
            arrays = {name: stored(each) for name, each in given.items()}
            there = {**arrays, **tensors(case, inputs)}
            if case.forward:
                there |= tensors(case, {"result": given["result"]})
            slots = []
            for each in (arrays, there):
                *data, result = each.values()
                slots.append(np.zeros((projection.blocks, projection.slots)))
                for block in range(projection.blocks):
                    projection.run(block, data, result, slots[-1][block], lambda: False)
            if exact:
                assert np.array_equal(slots[0], slots[1])
            assert np.allclose(slots[1], slots[0], rtol=1e-12, atol=1e-12 * np.abs(slots[0]).max())


@pytest.mark.parametrize("wrong", [0.0, 1.0, np.inf, np.nan])
@pytest.mark.parametrize("op", ["Convolution", "ConvolutionBackwardWeights"])
def test_reports_of_tensors(op: str, wrong: float) -> None:
    """A report of tensors passes an honest result and fails one wrong element, as that of arrays does."""
    case = layer(op, src_channels=96, dst_channels=96)
    engine, inputs = Engine(1), case.floats()
    result = compute(case, inputs)
    result[(0,) * 4] += np.float32(wrong)
    given = {**inputs, case.output_name: result}
    prepared = engine.preparer.prepare(op, case.attributes(), metas_of(given), Options(fast=True), verify=True)
    reports = [engine.judge(prepared, given, Stop(), on_gpu=each) for each in (None, tensors(case, given))]
    for report in reports:
        assert report["passed"] == (wrong == 0.0)
        assert report["projections"]["passed"] == (wrong == 0.0)
