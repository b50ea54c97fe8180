"""From a resolved operation to a plan within the limits."""

from __future__ import annotations

import numpy as np
import pytest

from app.planning import call_bytes, check_limits, describe_plan, plan_call, problem_of
from app.settings import Settings
from convgrad import TooLarge
from schemas.ops import ResolvedOp, TensorMeta, resolve
from tests.app.calls import SMALL
from tests.problems import Case, random_case


def resolved(case: Case) -> ResolvedOp:
    """Resolve a case as a door would."""
    inputs = {name: TensorMeta(case.dtype, shape) for name, shape in case.input_shapes.items()}
    return resolve(case.op, case.attributes(), inputs)


def test_shapes_and_work_agree_on_both_sides() -> None:
    """For random problems the kernels' descriptor has the shapes and the work that the schemas found."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        op = resolved(random_case(rng))
        problem = problem_of(op)
        assert problem.input_shapes == tuple(spec.shape for spec in op.inputs)
        assert problem.output_shape == op.output.shape
        assert problem.macs == op.macs


@pytest.mark.parametrize("name", ["work_limit", "output_limit", "memory_limit"])
def test_each_limit_refuses(name: str) -> None:
    """One below what the call needs is too little, and the error has the reason and both numbers."""
    op = resolved(SMALL)
    output = 4 * int(np.prod(op.output.shape))
    need = {"work_limit": op.macs, "output_limit": output, "memory_limit": call_bytes(op)}[name]
    check_limits(op, Settings.model_validate({name: need}))
    with pytest.raises(TooLarge) as caught:
        check_limits(op, Settings.model_validate({name: need - 1}))
    assert caught.value.data == {"reason": name.removesuffix("_limit"), "limit": need - 1, "value": need}


@pytest.mark.parametrize(
    ("kernel", "channels"), [((1 << 18,), 1), ((1 << 9, 1 << 9), 1), ((1,), 1 << 22)], ids=["1D", "2D", "channels"]
)
def test_a_filter_whose_plan_would_be_huge_is_refused(kernel: tuple[int, ...], channels: int) -> None:
    """A short request can't make the service lay out tables of gigabytes."""
    ones = (1,) * len(kernel)
    op = resolved(Case(src_channels=channels, src_spatial=kernel, dst_spatial=ones, kernel=kernel))
    with pytest.raises(TooLarge) as caught:
        check_limits(op, Settings())
    assert caught.value.data["reason"] == "plan"
    assert caught.value.data["value"] > caught.value.data["limit"]


def test_the_reference_kernel_takes_no_endless_row_of_units() -> None:
    """What other kernels plan at once would be a unit a tap there."""
    op = resolved(Case(src_spatial=(1 << 15,), dst_spatial=(1,), kernel=(1 << 15,)))
    assert len(plan_call(op, Settings()).units) < 64
    with pytest.raises(TooLarge) as caught:
        plan_call(op, Settings(), reference=True)
    assert caught.value.data == {"reason": "plan", "limit": 1 << 14, "value": 1 << 15}


def test_a_plan_is_described() -> None:
    """Kernel, work, units and tiles of a plan are said."""
    plan = plan_call(resolved(SMALL), Settings(workers=2))
    said = describe_plan(plan)
    assert said["kernel"] == plan.kernel
    assert said["units"] == len(plan.units) >= said["tiles"] > 0
