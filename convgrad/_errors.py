"""The errors of the project, independent of how an API reports them.

ConvgradError                     error
|- CallerError                    caller_error            the call is wrong and has to be changed
|  |- ParseError                  parse_error             malformed data
|  |- InvalidRequest              invalid_request         the request violates the API's protocol
|  |- UnknownOperation            unknown_operation       no operation or method has that name
|  |- InvalidParams               invalid_params          attributes, shapes or options break a rule
|  |- NotAcceptable               not_acceptable          no reply format that the caller accepts
|  |- UnsupportedMediaType        unsupported_media_type  the content type or encoding is not supported
|  |- TooLarge                    too_large               bytes, output, scratch or work exceed a limit
|  |- Unsupported                 unsupported             the dtype or layout is not supported
|  |- Unauthorised                unauthorised            the API key is missing or not valid
|  |- Forbidden                   forbidden               the host name, the web origin or the key is not allowed
|  |- NotFound                    not_found               no such page, sealed check, job or shared memory
|  `- MethodNotAllowed            method_not_allowed      the page does not support the HTTP method
|- ServiceError                   service_error           the call is right and may succeed later
|  |- Overloaded                  overloaded              the queue or the memory is full
|  |- RateLimited                 rate_limited            the key or address has used up its share
|  |- ShuttingDown                shutting_down           the service is draining
|  |- DeadlineExceeded            deadline_exceeded       the deadline passed
|  |- Cancelled                   cancelled               the caller cancelled or disconnected
|  |- WorkerLost                  worker_lost             the same unit of work crashed several workers
|  `- InternalError               internal_error          a bug in the service
`- TransportError                 transport_error         client only: no complete reply
   |- ConnectFailed               connect_failed          no connection to the service
   |- TimedOut                    timed_out               no reply in time
   |- BrokenStream                broken_stream           the reply stopped before its end
   `- ProtocolError               protocol_error          the reply is malformed
"""

# ruff: noqa: N818 - the names are the public contract; `except convgrad.Overloaded` reads as it should

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

__all__ = [
    "PROBLEM_JSON",
    "BrokenStream",
    "CallerError",
    "Cancelled",
    "ConnectFailed",
    "ConvgradError",
    "DeadlineExceeded",
    "Forbidden",
    "InternalError",
    "InvalidParams",
    "InvalidRequest",
    "MethodNotAllowed",
    "NotAcceptable",
    "NotFound",
    "Overloaded",
    "ParseError",
    "ProtocolError",
    "RateLimited",
    "ServiceError",
    "ShuttingDown",
    "SpoolFull",
    "Starting",
    "TimedOut",
    "TooLarge",
    "TransportError",
    "Unauthorised",
    "UnknownOperation",
    "Unsupported",
    "UnsupportedMediaType",
    "WorkerLost",
    "error_classes",
    "error_from_code",
]

PROBLEM_JSON = "application/problem+json"
"""The media type of errors over HTTP, RFC 9457."""


class ConvgradError(Exception):
    """Base class of all errors of this project.

    `message` is for people and never contains input data; `data` is machine-readable.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.data: dict[str, Any] = dict(data or {})

    def __str__(self) -> str:
        return self.message


class CallerError(ConvgradError):
    """The call is wrong and has to be changed to succeed."""

    code = "caller_error"


class ParseError(CallerError):
    """Malformed data: JSON, base64, `.npy`, multipart or frames."""

    code = "parse_error"


class InvalidRequest(CallerError):
    """The request violates the protocol of its API."""

    code = "invalid_request"


class UnknownOperation(CallerError):
    """No operation or method has that name."""

    code = "unknown_operation"


class InvalidParams(CallerError):
    """Attributes, inputs, shapes or options break a rule.

    `errors` lists every broken rule as `{"loc": [..], "msg": .., "type": ..}`; `loc` leads to the value,
    such as `["attributes", "strides", 0]`. The same list is `data["errors"]`.
    """

    code = "invalid_params"

    def __init__(
        self,
        message: str,
        *,
        errors: Sequence[Mapping[str, Any]] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, data=data)
        if errors is not None:
            self.data["errors"] = [dict(error) for error in errors]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Every broken rule, in the order of the call's parts."""
        found = self.data.get("errors")
        return found if isinstance(found, list) else []


class NotAcceptable(CallerError):
    """There is no reply format that the caller accepts."""

    code = "not_acceptable"


class UnsupportedMediaType(CallerError):
    """The API does not support the request's content type or encoding."""

    code = "unsupported_media_type"


class TooLarge(CallerError):
    """Bytes, output, scratch memory or work of the call exceed a limit."""

    code = "too_large"


class Unsupported(CallerError):
    """The operation, or this service, does not support the dtype or layout."""

    code = "unsupported"


class Unauthorised(CallerError):
    """The API key is missing or not valid."""

    code = "unauthorised"


class Forbidden(CallerError):
    """The host name, or the origin of the web page, is not allowed; or the sealed check belongs to another key."""

    code = "forbidden"


class NotFound(CallerError):
    """There is no such page, check, job or shared-memory region."""

    code = "not_found"


class MethodNotAllowed(CallerError):
    """The page does not support the HTTP method."""

    code = "method_not_allowed"


class ServiceError(ConvgradError):
    """The call is right but failed: it may succeed later."""

    code = "service_error"


class _RetryLater(ServiceError):
    """An error with `retry_after`, the seconds to wait before retrying, also in `data["retry_after"]`."""

    def __init__(
        self, message: str, *, retry_after: float | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, data=data)
        if retry_after is not None:
            self.data["retry_after"] = retry_after

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before retrying, or None if the service gave none."""
        value = self.data.get("retry_after")
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None


class Overloaded(_RetryLater):
    """The queue or the memory of the service is full."""

    code = "overloaded"


class Starting(Overloaded):
    """The service is compiling or loading its kernels; clients get it as `Overloaded` with `data["progress"]`."""


class SpoolFull(Overloaded):
    """No room for another job in the spool, or on its disk; clients get it as `Overloaded`."""


class RateLimited(_RetryLater):
    """The key, or the address, has used up its share of the service for now."""

    code = "rate_limited"


class ShuttingDown(_RetryLater):
    """The service is draining and takes no new calls."""

    code = "shutting_down"


class DeadlineExceeded(ServiceError):
    """The caller's deadline, or the service's, passed before the result was complete."""

    code = "deadline_exceeded"


class Cancelled(ServiceError):
    """The caller disconnected or cancelled the call."""

    code = "cancelled"


class WorkerLost(ServiceError):
    """The same unit of work crashed more than one worker process."""

    code = "worker_lost"


class InternalError(ServiceError):
    """A bug in the service. The message has no details; they are in its log under the request id."""

    code = "internal_error"


class TransportError(ConvgradError):
    """Client only: there was no complete reply."""

    code = "transport_error"


class ConnectFailed(TransportError):
    """No connection to the service could be made, or a proxy lost its own (502)."""

    code = "connect_failed"


class TimedOut(TransportError):
    """The reply did not arrive within the client's timeout."""

    code = "timed_out"


class BrokenStream(TransportError):
    """The reply stopped before its end."""

    code = "broken_stream"


class ProtocolError(TransportError):
    """The reply is malformed: wrong magic number, checksum, length or JSON."""

    code = "protocol_error"


def error_classes() -> dict[str, type[ConvgradError]]:
    """Return every public error class, including the abstract ones, by code."""
    found: dict[str, type[ConvgradError]] = {}
    pending: list[type[ConvgradError]] = [ConvgradError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        # A class without a code of its own (`_RetryLater`) is a helper, not a kind of error.
        if "code" in cls.__dict__:
            found[cls.code] = cls
    return found


def error_from_code(code: str, message: str, *, data: Mapping[str, Any] | None = None) -> ConvgradError:
    """Build the error with this code; an unknown code gives a `ServiceError`."""
    return error_classes().get(code, ServiceError)(message, data=data)
