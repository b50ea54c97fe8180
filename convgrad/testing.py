"""Verdicts in test suites, computed in the process of the tests: for pytest, unittest and plain asserts.

>>> from convgrad.testing import assert_honest  # doctest: +SKIP
>>> def test_my_kernel():  # doctest: +SKIP
...     assert_honest(my_kernel(src, diff_dst), "ConvolutionBackwardWeights", inputs, attributes)

With pytest there is also the fixture `convgrad_client`, a client for the whole session, which needs no import.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from convgrad._client import Client
from convgrad._report import Report
from convgrad._requests import Inputs
from convgrad._tensors import Tensor

__all__ = ["assert_honest"]


def assert_honest(
    result: Tensor,
    op: str,
    inputs: Inputs,
    attributes: Mapping[str, Any] | None = None,
    *,
    output: str | None = None,
    fast: bool | None = None,
    arithmetic: Mapping[str, Any] | None = None,
    client: Client | None = None,
) -> Report:
    """Verify `result`, of your own kernel, with the float64 reference of `op`, and return the report (`Client.verify`).

    `output` names what the result is where the operation has several outputs; `fast` verifies by random projections;
    `arithmetic` is what the kernel declares (`Client.verify`).
    Without a `client` the verification runs in this process, which needs ``convgrad[compute]``.

    Raises `AssertionError` with the text of the report if the errors are not those of an honest sum, and what `verify`
    raises for a call that is not valid.
    """
    more: Any = {"output": output, "fast": fast, "arithmetic": arithmetic}
    report = (client or _local()).verify(op, inputs, result, attributes, **more)
    if not report.passed:
        raise AssertionError(report.text())
    return report


@cache
def _local() -> Client:
    from convgrad._local import local

    return local(progress=False)
