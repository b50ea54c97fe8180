"""What an exception of whatever kind is to those who called: an error of the tree."""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect

from convgrad import _errors as errors
from convgrad._errors import ConvgradError, InternalError

__all__ = ["as_convgrad_error"]


def as_convgrad_error(error: BaseException, *, log: logging.Logger | None = None) -> ConvgradError:
    """Return `error` when it is of the tree, an `InternalError` without any detail otherwise.

    The details go to `log`. Don't keep the result in a variable where `error` was caught: together with the
    traceback that would be a reference cycle, and the call's memory would wait for the garbage collector.
    """
    if isinstance(error, ConvgradError):
        return error
    if isinstance(error, ClientDisconnect):
        return errors.Cancelled("the client left before its request was complete")
    if log is not None:
        log.error("a fault of the service", exc_info=error)
    return InternalError("a fault of the service; its log has the details under the request id")
