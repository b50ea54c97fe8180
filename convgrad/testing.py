"""A fixture for pytest: a client of a local service that a test session shares.

Import it in `conftest.py`, or in the module of the tests:

>>> from convgrad.testing import convgrad_client  # doctest: +SKIP
>>> def test_my_kernel(convgrad_client):  # doctest: +SKIP
...     report = convgrad_client.verify("ConvolutionBackwardWeights", inputs, my_result, attributes)
...     assert report.passed, report.text()
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from convgrad._local import LocalClient, local

__all__ = ["convgrad_client"]


@pytest.fixture(scope="session")
def convgrad_client() -> Iterator[LocalClient]:
    """A client of a local service (`convgrad.local`), which the processes of pytest-xdist share."""
    with local(progress=False) as client:
        yield client
