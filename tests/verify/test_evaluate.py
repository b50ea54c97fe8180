"""Results in float64 for the judge: whole problems, changed inputs, and all taps of an image at once."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.problem import ConvProblem
from tests.kernels.harness import problem_of, stored
from tests.naive import DTYPES
from tests.problems import Case, Tensor, random_case
from verify import evaluate as module
from verify.evaluate import evaluate, gradients, pixel_chunks
from verify.stopping import Stopped, raising

LAYER = Case(
    n=3, src_channels=4, dst_channels=6, groups=2, src_spatial=(6, 5), dst_spatial=(6, 5), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip


def never() -> bool:
    """Do not stop."""
    return False


def square(values: Tensor, place: int) -> Tensor:
    """Square the values of any input."""
    return np.square(values)


def given(case: Case, inputs: dict[str, Tensor]) -> tuple[ConvProblem, list[Tensor]]:
    """Return the problem of a case and its inputs as they are stored."""
    return problem_of(case), [*map(stored, inputs.values())]


@pytest.mark.parametrize("laid_out", [0, 1 << 22])
def test_results_are_those_of_the_oracle(laid_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random problems of integers have the oracle's results, whether a tensor is laid out for all taps or not."""
    monkeypatch.setattr(module, "_LAID_OUT", laid_out)
    rng, seen = np.random.default_rng(8), set()
    for _ in range(120):
        case = random_case(rng, macs=10_000)
        inputs = case.inputs()
        found = evaluate(*given(case, inputs), never)
        assert found is not None
        assert np.array_equal(found.astype(DTYPES[case.dtype]), case.expected(inputs)), case
        seen.add(case.op)
    assert len(seen) == 8


@pytest.mark.parametrize("weights_format", ["OIX", "XIO"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_gradients_of_changed_inputs(data_format: str, weights_format: str) -> None:
    """Several gradients are formed in one pass: of the inputs, and of their squares."""
    case = Case(**{**vars(LAYER), "data_format": data_format, "weights_format": weights_format})
    inputs = case.inputs()
    found = gradients(*given(case, inputs), never, [None, square])
    assert found is not None
    squared = {name: np.square(tensor) for name, tensor in inputs.items()}
    assert np.array_equal(found[0], case.expected(inputs))
    assert np.array_equal(found[1].astype(np.float32), case.expected(squared))


def test_infinities_stay_where_they_meet_data() -> None:
    """Inf at a corner of src reaches the taps that see the corner; the padding that others see makes no NaN."""
    inputs = LAYER.inputs()
    inputs["src"][0, 0, 0, 0] = np.inf
    inputs["diff_dst"][...] = 1
    found = evaluate(*given(LAYER, inputs), never)
    assert found is not None
    assert np.array_equal(found, LAYER.expected(inputs))
    assert np.isinf(found).sum() == 3 * 4  # dst channels of the group, taps that see the corner


def test_it_stops() -> None:
    """Nothing is returned once `stop` says so."""
    with pytest.raises(Stopped):
        evaluate(*given(LAYER, LAYER.inputs()), raising(lambda: True))


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_chunks_cover_an_image(data_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 pixels are those of the image, in order, channels first and by groups."""
    monkeypatch.setattr(module, "CHUNK", 1)
    case = Case(**{**vars(LAYER), "data_format": data_format, "src_spatial": (20, 9), "dst_spatial": (20, 9)})
    image = case.inputs()["src"][:1]
    chunks = list(pixel_chunks(image, problem_of(case)))
    assert [some.start for some, _ in chunks] == [0, 64, 128]
    joined = np.concatenate([values for _, values in chunks], axis=2)
    channels_first = image[0] if data_format == "NCX" else np.moveaxis(image[0], -1, 0)
    assert np.array_equal(joined, channels_first.reshape(2, 2, -1))
