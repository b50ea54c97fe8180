"""How many rows of a tensor are final."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.replies.npy import ReadyRows


def test_rows_are_final_when_all_their_boxes_are() -> None:
    """With boxes out of order, rows count only if all rows before them are complete."""
    rows = ReadyRows((4, 6))
    assert rows.add((2, 0), (2, 6)) == 0
    assert rows.add((0, 0), (1, 3)) == 0
    assert rows.add((0, 3), (2, 3)) == 1
    assert rows.add((1, 0), (1, 3)) == 4


@given(st.permutations(range(12)))
def test_any_order_of_boxes(order: list[int]) -> None:
    """For any order of the boxes, exactly the complete leading rows are reported as final."""
    ready, done = ReadyRows((6, 2, 5)), np.zeros((6, 2), bool)
    for index in order:
        row, column = divmod(index, 2)
        rows = ready.add((row, column, 0), (1, 1, 5))
        done[row, column] = True
        whole = done.all(axis=1)
        assert rows == (6 if whole.all() else int(np.argmin(whole)))


def test_a_tensor_without_elements_is_final() -> None:
    """A tensor without rows, or with empty rows, is complete from the start."""
    assert ReadyRows((0, 3)).rows == 0
    assert ReadyRows((3, 0)).add((0, 0), (3, 0)) == 3
