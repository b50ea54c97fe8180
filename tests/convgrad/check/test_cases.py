"""Cases that are drawn from a seed: always the same, valid calls, with the data that their kind promises."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad._check.cases import EXACT, KINDS, Case, draw
from convgrad._check.named import LAYERS, TRAPS, layer, trap
from convgrad._check.problems import DTYPES, OPS, Takes
from tests.convgrad.check.checking import assert_valid

EVERY = Takes(dtypes=DTYPES)


def test_a_number_gives_the_same_case_again() -> None:
    """A case depends on the seed and its number alone, down to the bits, and survives JSON."""
    for number in range(0, 200, 7):
        case = draw(3, number, EVERY)
        again = Case.from_json(case.as_json())
        assert again == case == draw(3, number, EVERY)
        assert [each.tobytes() for each in again.inputs().values()] == [
            each.tobytes() for each in case.inputs().values()
        ]
    assert draw(3, 0, EVERY) != draw(4, 0, EVERY)


def test_cases_are_valid_calls() -> None:
    """Random problems, traps and layers are calls that the service accepts, with the shapes it infers."""
    for number in range(400):
        assert_valid(draw(11, number, EVERY).problem)
    for op in OPS:
        for name in TRAPS:
            if (found := trap(name, op, "f32", EVERY)) is not None:
                assert_valid(found)
        for name in LAYERS:
            if (found := layer(name, op, "f32", EVERY, 200_000)) is not None:
                assert found.macs <= 200_000
                assert_valid(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_data_is_what_its_kind_says(kind: str, dtype: str) -> None:
    """Only `special` has Inf or NaN; sums of `integers` stay exact; `subnormals` are."""
    finest = float(np.finfo(np.float64).tiny) if dtype == "f64" else {"f16": 2.0**-14}.get(dtype, 2.0**-126)
    for number in range(16):
        case = draw(5, number, Takes(dtypes=(dtype,)), kinds=[kind])
        inputs = {name: values.astype(np.float64) for name, values in case.inputs().items()}
        finite = all(np.isfinite(values).all() for values in inputs.values())
        assert finite or kind == "special"
        if kind in EXACT:
            largest = {name: float(np.abs(each).max(initial=0)) for name, each in inputs.items()}
            added = 0.0 if case.problem.of_bias else largest.pop("bias", 0.0)
            terms = 1 if kind == "impulse" else case.problem.sum_length
            assert terms * np.prod(list(largest.values())) + added <= 2 ** (53 if dtype == "f64" else 24)
            assert all((values == np.rint(values)).all() for values in inputs.values())
        if kind == "subnormals":
            assert np.abs(next(iter(inputs.values()))).max(initial=0) < finest


def test_problems_are_within_what_a_kernel_takes() -> None:
    """No case has a stride, dilation, pad, group, format, rank or bias that the kernel does not take."""
    takes = Takes(
        ops=("Convolution", "ConvolutionBackwardWeights"), dtypes=("f16",), ranks=(1, 3), data_formats=("NXC",),
        weights_formats=("XIO",), strides=False, dilations=False, uneven_pads=False, groups=False, bias=False,
        empty=False,
    )  # fmt: skip
    for number in range(200):
        found = draw(1, number, takes).problem
        assert found.rank in (1, 3)
        assert {*found.strides, *found.dilations, found.groups} == {1}
        assert found.pads_begin == found.pads_end
        assert (found.data_format, found.weights_format, found.bias) == ("NXC", "XIO", False)
        assert found.n > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"op": []}, "no field 'op'"),
        ({"ranks": [4]}, "may only contain 1, 2, 3"),
        ({"groups": 1}, "must be true or false"),
    ],
)
def test_what_a_kernel_takes_is_checked(given: dict[str, object], message: str) -> None:
    """A misspelt field or a value that does not exist is an error that names what there is."""
    with pytest.raises(ValueError, match=message):
        Takes.from_json(given)
