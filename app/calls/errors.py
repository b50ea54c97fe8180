"""Turn any exception into the `ConvgradError` that the caller sees."""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect

from convgrad import _errors as errors
from convgrad._errors import ConvgradError, InternalError

__all__ = ["as_convgrad_error"]


def as_convgrad_error(error: BaseException, *, log: logging.Logger | None = None) -> ConvgradError:
    """Return `error` if it is a `ConvgradError`, otherwise an `InternalError` without details, which go to `log`.

    Don't keep the result in a variable where `error` was caught: with the traceback that makes a reference cycle, and
    the call's memory waits for the garbage collector.
    """
    if isinstance(error, ConvgradError):
        return error
    if isinstance(error, ClientDisconnect):
        return errors.Cancelled("the client disconnected before its request was complete")
    if log is not None:
        log.error("internal error", exc_info=error)
    return InternalError("internal error; the service's log has the details under the request id")
