"""What every test of the kernels runs under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.poison import poisoned


@pytest.fixture(scope="package", autouse=True)
def _scratch_is_poisoned() -> Iterator[None]:
    """Give kernels scratch memory full of NaN."""
    with poisoned():
        yield
