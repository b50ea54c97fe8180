"""What a kernel may declare of its arithmetic, by operation and dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from convgrad import _arithmetic as names
from convgrad._errors import InvalidParams, TooLarge
from engine.options import parse_options
from engine.planning import Limits
from engine.prepare import Preparer
from engine.process import metas_of
from schemas import wire
from tests.problems import Case
from verify.arithmetic import PRODUCTS, Arithmetic

LAYER = Case(kernel=(3, 3), src_spatial=(8, 8), dst_spatial=(6, 6))
STRIDED = replace(LAYER, strides=(2, 2), dst_spatial=(3, 3))


def declared(case: Case, arithmetic: Any) -> Arithmetic:
    """Return the arithmetic by which the result of a case is verified."""
    inputs = {**case.inputs(), case.output_name: case.expected(case.inputs())}
    options = parse_options({"arithmetic": arithmetic})
    prepared = Preparer(Limits(2)).prepare(case.op, case.attributes(), metas_of(inputs), options, verify=True)
    found: Arithmetic = prepared.plan.problem.arithmetic  # type: ignore[attr-defined] # that of a verification
    return found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, Arithmetic()),
        ({}, Arithmetic()),
        ({"products": "tf32", "sum": None}, Arithmetic("tf32")),
        ({"segments": 8, "segment_sum": "bf16"}, Arithmetic(segments=8, segment_sum="bf16")),
        ({"algorithm": "winograd F(2,3)", "sum": "f64"}, Arithmetic(sum="f64", algorithm="winograd F(2,3)")),
        ({"algorithm": "fft"}, Arithmetic(algorithm="fft")),
    ],
)
def test_a_declaration_is_read(given: Any, found: Arithmetic) -> None:
    """What is not declared is as usual."""
    assert declared(LAYER, given) == found


def test_all_that_is_known_may_be_declared() -> None:
    """The client names what the judge has a model of, and so does the schema."""
    assert {*names.PRODUCTS} == {*PRODUCTS}
    schema = wire.Arithmetic.model_json_schema()["properties"]
    for member, known in (("products", names.PRODUCTS), ("sum", names.SUMS), ("segment_sum", names.SEGMENT_SUMS)):
        assert set(schema[member]["anyOf"][0]["enum"]) == {*known}
        assert all(declared(LAYER, {member: name}) for name in known)


@pytest.mark.parametrize(
    ("case", "given", "member", "words"),
    [
        (LAYER, {"product": "tf32"}, "product", "products, sum, segments"),
        (LAYER, {"products": "fp8"}, "products", "bf16x6"),
        (LAYER, {"sum": 3}, "sum", "f64 or f32"),
        (LAYER, {"segments": 0}, "segments", "from 1 to"),
        (LAYER, {"segment_sum": "int8"}, "segment_sum", "bf16"),
        (LAYER, {"segment_sum": "f32 truncated"}, "segment_sum", "bf16"),
        (LAYER, {"algorithm": "winograd"}, "algorithm", "winograd F(m, r)"),
        (LAYER, {"algorithm": "winograd F(4, 5)"}, "algorithm", "3 x 3"),
        (LAYER, {"algorithm": "winograd F(12, 3)"}, "algorithm", "at most 10"),
        (STRIDED, {"algorithm": "fft"}, "algorithm", "strides"),
        (replace(LAYER, dtype="bf16"), {"products": "tf32"}, "products", "bf16"),
        (replace(LAYER, dtype="f64"), {"sum": "bf16"}, "sum", "f64 or f32"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(case: Case, given: Any, member: str, words: str) -> None:
    """The error says what may be declared, and where it is."""
    with pytest.raises(InvalidParams) as refused:
        declared(case, given)
    (found,) = refused.value.errors
    assert found["loc"] == ["options", "arithmetic", member]
    assert words in found["msg"]


@pytest.mark.parametrize("given", [[], "tf32", {"products": ["tf32"]}, {"segments": 1.5}, {"segments": True}])
def test_a_declaration_of_another_form_is_refused(given: Any) -> None:
    """It is an object of names and integers."""
    with pytest.raises(InvalidParams, match="arithmetic must be an object"):
        parse_options({"arithmetic": given})


def test_a_verification_has_room_for_its_inputs() -> None:
    """Where inputs are rounded, those that are read are a part of the scratch memory."""
    inputs = metas_of({**LAYER.inputs(), LAYER.output_name: np.zeros(LAYER.output_shape, np.float32)})
    plain, rounded = (
        Preparer(Limits(2)).prepare(LAYER.op, LAYER.attributes(), inputs, parse_options(options), verify=True).plan
        for options in ({}, {"arithmetic": {"products": "bf16"}})
    )
    assert rounded.scratch_bytes - plain.scratch_bytes >= sum(each.nbytes for each in LAYER.inputs().values())
    assert rounded.stages == plain.stages + 1


def test_a_verification_that_copies_more_than_fits_is_refused() -> None:
    """The reference copies an image as float64: where that is too much, the call is refused before it is computed."""
    inputs = metas_of({**LAYER.inputs(), LAYER.output_name: np.zeros(LAYER.output_shape, np.float32)})
    arguments = LAYER.op, LAYER.attributes(), inputs
    plan = Preparer(Limits(1)).prepare(*arguments, parse_options({}), verify=True).plan
    given = LAYER.inputs().values()
    little = plan.scratch_bytes + 4 * sum(each.nbytes for each in given)
    with pytest.raises(TooLarge, match="bytes of tensors and scratch") as caught:
        Preparer(Limits(1, memory_budget=little)).prepare(*arguments, parse_options({}), verify=True)
    enough = caught.value.data["value"]
    assert enough - plan.scratch_bytes > 2 * sum(each.nbytes for each in given)
    Preparer(Limits(1, memory_budget=enough)).prepare(*arguments, parse_options({}), verify=True)
