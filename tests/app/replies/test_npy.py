"""How many rows of a tensor are final."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.replies.npy import ReadyRows


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
