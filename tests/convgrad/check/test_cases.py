"""Cases that are drawn from a seed: always the same, valid calls, with the data that their kind promises."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad._check.cases import EXACT, KINDS, Case, draw
from convgrad._check.covering import LEVELS, covering
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
            product = max(largest.values()) if case.problem.of_bias else np.prod(list(largest.values()))
            assert terms * product + added <= 2 ** (53 if dtype == "f64" else 24)
            assert all((values == np.rint(values)).all() for values in inputs.values())
        if kind == "subnormals":
            assert np.abs(next(iter(inputs.values()))).max(initial=0) < finest


def test_rows_have_every_level_and_every_pair() -> None:
    """31 rows of the covering array have each level of an attribute, 961 each pair of levels of two attributes."""
    rows = []
    for row in range(LEVELS**2):
        choose = covering(np.random.default_rng(9), row)
        rows.append([choose(range(LEVELS)) for _ in range(LEVELS)])
    levels = np.array(rows)
    for one, other in ((0, 1), (3, 17), (29, 30)):
        assert len({*levels[:LEVELS, one]}) == LEVELS
        assert len(np.unique(levels[:, one] * LEVELS + levels[:, other])) == LEVELS**2


def test_cases_reach_the_borders() -> None:
    """Some hundred cases have channels, batches, kernels and steps beyond each border, and four features at once."""
    takes = Takes(ops=("ConvolutionBackwardWeights",), dtypes=("f32",))
    found = [draw(7, number, takes).problem for number in range(400)]
    for beyond in (12, 16, 33, 64, 129, 255):
        assert any(problem.src_channels // problem.groups > beyond for problem in found)
        assert any(problem.n > beyond for problem in found) or beyond == 255
    assert {6, 7} <= {stride for problem in found for stride in problem.strides}
    assert max(max(problem.kernel) for problem in found) > 64
    assert max(max(problem.dilations) for problem in found) > 64
    assert any(
        max(p.strides) > 1 and max(p.dilations) > 1 and p.groups > 1 and p.pads_begin != p.pads_end for p in found
    )


def test_sums_of_integers_have_all_digits() -> None:
    """Some exact sums need all 24 bits of f32, so that a cleared last bit shows."""
    takes = Takes(ops=("BiasAddBackward",), dtypes=("f32",), data_formats=("NCX",))
    cases = [draw(3, number, takes, kinds=["integers"]) for number in range(20)]
    sums = [case.inputs()["diff_dst"].astype(np.float64).sum((0, *range(2, case.problem.rank + 2))) for case in cases]
    assert any((np.abs(each) >= 2**23).any() for each in sums)


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
