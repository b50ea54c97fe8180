"""What the report says of a wrong result: the mistake that explains it, if one does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.harness import problem_of
from tests.problems import Case, Tensor
from tests.verify.judged import verify
from verify.arithmetic import PLAIN
from verify.compared import Compared
from verify.hints import hints

LAYER = Case(
    n=3, src_channels=6, dst_channels=8, src_spatial=(12, 10), dst_spatial=(12, 10), kernel=(3, 3), pads_begin=(1, 1),
    pads_end=(1, 1),
)  # fmt: skip


def hinted(case: Case, inputs: dict[str, Tensor], result: Tensor, *words: str) -> None:
    """Check that a result fails, and that each of these words is in one of its hints."""
    report = verify(case, inputs, result)
    assert not report["passed"]
    for word in words:
        assert any(word in hint for hint in report["hints"]), (word, report["hints"])


def test_attributes_that_were_ignored() -> None:
    """Strides, dilations and pads that a kernel ignored are named."""
    case = replace(
        LAYER, op="Convolution", src_spatial=(24, 24), dst_spatial=(12, 12), strides=(2, 2), pads_end=(0, 0)
    )  # fmt: skip
    inputs = case.floats()
    dense = replace(case, strides=(1, 1), dst_spatial=(23, 23)).expected(inputs)[:, :, :12, :12].copy()
    hinted(case, inputs, dense, "as if strides were 1")
    case = replace(LAYER, dilations=(2, 2), pads_begin=(2, 2), pads_end=(2, 2))
    inputs = case.floats()
    dense = replace(case, dilations=(1, 1), pads_end=(0, 0)).expected(inputs)
    hinted(case, inputs, dense, "as if dilations were 1")


def test_group_offsets_and_images() -> None:
    """A group that reads the channels of the next one, and an image that was left out, are named."""
    case = replace(LAYER, groups=2)
    inputs = case.floats()
    result = case.expected({**inputs, "src": np.roll(inputs["src"], -3, 1)})
    hinted(case, inputs, result, "every group read the src channels of the next one")
    inputs = LAYER.floats()
    without = replace(LAYER, n=2).expected({name: tensor[:2] for name, tensor in inputs.items()})
    hinted(LAYER, inputs, without, "image 2 of 3 is left out")
    result = LAYER.expected(inputs)
    result[5, 3, 2, 1] = without[5, 3, 2, 1]
    hinted(LAYER, inputs, result, "image 2 of 3 is left out in the wrong elements")


def test_nothing_but_the_whole_sum_is_missing() -> None:
    """Where one row has all products of the wrong elements, these are zero, and no row is named."""
    inputs = LAYER.floats()
    inputs["diff_dst"][:, :, 1:] = 0
    result = LAYER.expected(inputs)
    result[4:] = 0
    report = verify(LAYER, inputs, result)
    assert report["where"]["text"] == "all 144 wrong elements have dst channel >= 4 and tap y >= 1, and they are 0"
    assert report["hints"] == []


def test_padding_that_was_not_masked() -> None:
    """A kernel that reads the end of the row before instead of zeros is recognised."""
    case = replace(LAYER, op="Convolution", kernel=(1, 3), pads_begin=(0, 1), pads_end=(0, 1))
    inputs = case.floats()
    flat = inputs["src"].reshape(3, 6, -1)
    padded = np.pad(flat, ((0, 0), (0, 0), (1, 1))).astype(np.float64)
    result = sum(
        np.einsum("oi,nix->nox", inputs["weights"][:, :, 0, tap].astype(np.float64), padded[:, :, tap : tap + 120])
        for tap in range(3)
    )
    hinted(case, inputs, np.asarray(result, np.float32).reshape(case.output_shape), "padding were not masked")


def test_layouts() -> None:
    """Swapped taps and channels, in every format, and other layouts of the weights are named."""
    case = replace(LAYER, src_channels=8)
    inputs = case.floats()
    right = case.expected(inputs)
    hinted(case, inputs, np.swapaxes(right, 2, 3).copy(), "last two axes of its taps swapped")
    swapped = np.swapaxes(right, 0, 1).copy()
    hinted(case, inputs, swapped, "two channel axes swapped", "src and diff_dst are not swapped")
    for weights_format in ("XIO", "XOI", "IOX"):
        other = replace(case, weights_format=weights_format)
        axes = (-2, -1) if weights_format.startswith("X") else (0, 1)
        hinted(other, inputs, np.swapaxes(other.expected(inputs), *axes).copy(), "two channel axes swapped")
    moved = np.ascontiguousarray(right.transpose(0, 2, 3, 1)).reshape(right.shape)
    hinted(case, inputs, moved, "the result has the layout OXI instead of OIX")


@pytest.mark.parametrize("shift", [(1, 0), (0, -1), (1, 1), (-2, 1)])
def test_wrong_padding_is_named(shift: tuple[int, int]) -> None:
    """A gradient computed with other pads is told apart: the hint has the pads that it was computed with."""
    begin = tuple(2 + far for far in shift)
    case = replace(LAYER, pads_begin=(2, 2), pads_end=(2, 2), kernel=(5, 5), src_channels=9)
    wrong = replace(case, pads_begin=begin, pads_end=tuple(4 - pad for pad in begin))
    inputs = case.floats()
    report = verify(case, inputs, wrong.expected(inputs))
    assert not report["passed"]
    assert any(f"as if pads_begin were {list(begin)}" in hint for hint in report["hints"])


def test_noise_has_no_explanation() -> None:
    """A gradient averaged over the batch is told apart; noise has no explanation."""
    inputs = LAYER.floats()
    right = LAYER.expected(inputs)
    hinted(LAYER, inputs, right / 3, "averaged over the batch")
    noise = np.random.default_rng(1).standard_normal(right.shape).astype(np.float32)
    assert verify(LAYER, inputs, noise)["hints"] == []


def test_data_that_look_alike_give_no_hints() -> None:
    """One wrong element of a constant gradient is no shift and no flip, though it equals both nearly everywhere."""
    case = replace(LAYER, pads_begin=(0, 0), pads_end=(0, 0), dst_spatial=(10, 8))
    inputs = {name: np.ones_like(tensor) for name, tensor in case.inputs().items()}
    result = case.expected(inputs)
    result[0, 0, 0, 0] *= 2
    report = verify(case, inputs, result)
    assert (report["passed"], report["worst"]["index"], report["hints"]) == (False, [0, 0, 0, 0], [])


def test_many_small_images_give_the_same_hints() -> None:
    """Mistakes in gradients of a thousand small images are named, as those of a few large ones are."""
    case = replace(
        LAYER, n=1000, src_channels=3, dst_channels=3, src_spatial=(2, 2), dst_spatial=(2, 2), pads_end=(1, 1)
    )
    inputs = case.floats()
    right = case.expected(inputs)
    assert verify(case, inputs, right)["passed"]
    lost = case.expected({name: np.concatenate([tensor[:-1], 0 * tensor[-1:]]) for name, tensor in inputs.items()})
    assert not verify(case, inputs, lost)["passed"]
    assert "reverse order" in verify(case, inputs, right[..., ::-1, ::-1].copy())["hints"][0]
    cut = {name: (tensor.view(np.uint32) & 0xFFFFE000).view(np.float32) for name, tensor in inputs.items()}
    assert verify(case, inputs, case.expected(cut))["causes"][0]["cause"] == "the inputs were read as TF32, truncated"


def test_large_results_are_recognised_by_a_part_of_them() -> None:
    """A result of a million elements that is rearranged is recognised, and noise is not."""
    case = Case(src_channels=512, dst_channels=512, src_spatial=(2, 2), dst_spatial=(1, 1), kernel=(2, 2))
    problem, rng = problem_of(case), np.random.default_rng(3)
    exact = rng.standard_normal(problem.output_shape)
    inputs = [np.zeros(shape, np.float32) for shape in problem.input_shapes]
    for wrong, words in (
        (exact[..., ::-1, ::-1], "its taps in reverse order"),
        (exact.swapaxes(0, 1), "its two channel axes swapped"),
        (exact.transpose(2, 3, 0, 1).reshape(exact.shape), "has the layout XOI instead of OIX"),
        (3 * exact, "is 3 times the reference"),
        (rng.standard_normal(exact.shape), ""),
    ):
        stored_result = np.ascontiguousarray(wrong, np.float32)
        compared = Compared(problem, inputs, stored_result, exact, None, np.ones_like(exact), arithmetic=PLAIN)
        found = hints(compared, np.full(exact.shape, 2, np.float32), (0, 0, 0, 0), lambda: False)
        assert any(words in sentence for sentence in found) if words else not found
