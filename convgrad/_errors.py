"""The one error tree of the project: what can go wrong, and nothing about how an API says it.

ConvgradError                     error
|- CallerError                    caller_error            the call can't succeed as it is: change it
|  |- ParseError                  parse_error             the bytes are not what they claim to be
|  |- InvalidRequest              invalid_request         the envelope breaks its protocol
|  |- UnknownOperation            unknown_operation       no operation or method of that name
|  |- InvalidParams               invalid_params          attributes, shapes or options break a rule
|  |- NotAcceptable               not_acceptable          no reply form that the caller accepts
|  |- UnsupportedMediaType        unsupported_media_type  a request form that no API reads
|  |- TooLarge                    too_large               bytes, output, scratch or work over a limit
|  |- Unsupported                 unsupported             a dtype or layout that this service lacks
|  |- Unauthorised                unauthorised            no key, or not a known one
|  |- Forbidden                   forbidden               a host or a web page that this service does not answer
|  |- NotFound                    not_found               no such page
|  `- MethodNotAllowed            method_not_allowed      the page exists, the verb does not
|- ServiceError                   service_error           the call was right: later it may succeed
|  |- Overloaded                  overloaded              queue or memory is full
|  |- RateLimited                 rate_limited            this key's share is used up
|  |- ShuttingDown                shutting_down           draining
|  |- DeadlineExceeded            deadline_exceeded       the caller's time or the server's is over
|  |- Cancelled                   cancelled               the caller went away or said so
|  |- WorkerLost                  worker_lost             the same piece of work took several workers down
|  `- InternalError               internal_error          a fault of ours
`- TransportError                 transport_error         client only: no whole answer came back
   |- ConnectFailed               connect_failed          nobody listens there
   |- TimedOut                    timed_out               an answer did not come in time
   |- BrokenStream                broken_stream           the answer stopped before its end
   `- ProtocolError               protocol_error          the answer is not in the agreed form
"""

# ruff: noqa: N818 - the names are the public contract; `except convgrad.Overloaded` reads as it should

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

__all__ = [
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


class ConvgradError(Exception):
    """Be the root of everything this project raises on purpose.

    `message` is for people and never contains input data; `data` holds machine-readable facts.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.data: dict[str, Any] = dict(data or {})

    def __str__(self) -> str:
        return self.message


class CallerError(ConvgradError):
    """The call can't succeed as it is: the caller has to change it."""

    code = "caller_error"


class ParseError(CallerError):
    """The bytes are not what they claim to be: broken JSON, base64, npy, multipart or frames."""

    code = "parse_error"


class InvalidRequest(CallerError):
    """The envelope breaks the protocol of its API."""

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
    """No reply form that the caller accepts exists."""

    code = "not_acceptable"


class UnsupportedMediaType(CallerError):
    """The request's content type or encoding is one that the API does not read."""

    code = "unsupported_media_type"


class TooLarge(CallerError):
    """Bytes, output, scratch or work of the call are over a limit."""

    code = "too_large"


class Unsupported(CallerError):
    """A dtype or layout that the operation, or this service, does not have."""

    code = "unsupported"


class Unauthorised(CallerError):
    """No key came with the call, or not a known one."""

    code = "unauthorised"


class Forbidden(CallerError):
    """The request is for a host name that the service is not asked by, or from a web page that may not call it."""

    code = "forbidden"


class NotFound(CallerError):
    """There is no such page."""

    code = "not_found"


class MethodNotAllowed(CallerError):
    """The page exists, the HTTP verb does not."""

    code = "method_not_allowed"


class ServiceError(ConvgradError):
    """The call was right and failed all the same: later, or elsewhere, it may succeed."""

    code = "service_error"


class _RetryLater(ServiceError):
    """Carry `retry_after`, the seconds to wait before asking again, also as `data["retry_after"]`."""

    def __init__(
        self, message: str, *, retry_after: float | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, data=data)
        if retry_after is not None:
            self.data["retry_after"] = retry_after

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before asking again, or None when the service did not say."""
        value = self.data.get("retry_after")
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None


class Overloaded(_RetryLater):
    """The queue or the memory of the service is full."""

    code = "overloaded"


class RateLimited(_RetryLater):
    """This key's share of the service is used up for now."""

    code = "rate_limited"


class ShuttingDown(_RetryLater):
    """The service is draining and takes no new calls."""

    code = "shutting_down"


class DeadlineExceeded(ServiceError):
    """The caller's deadline, or the server's maximum, was over before the result was complete."""

    code = "deadline_exceeded"


class Cancelled(ServiceError):
    """The caller went away, or cancelled the call."""

    code = "cancelled"


class WorkerLost(ServiceError):
    """The same piece of work took more than one worker process down."""

    code = "worker_lost"


class InternalError(ServiceError):
    """A fault of ours. The message never has details; they are in the log under the request id."""

    code = "internal_error"


class TransportError(ConvgradError):
    """Client only: no whole answer came back."""

    code = "transport_error"


class ConnectFailed(TransportError):
    """No connection to the service could be made."""

    code = "connect_failed"


class TimedOut(TransportError):
    """The answer did not come within the client's timeout."""

    code = "timed_out"


class BrokenStream(TransportError):
    """The answer stopped before its end."""

    code = "broken_stream"


class ProtocolError(TransportError):
    """The answer is not in the agreed form: wrong magic, checksum, length or JSON."""

    code = "protocol_error"


def error_classes() -> dict[str, type[ConvgradError]]:
    """Return every public class of the tree by its code, the abstract ones too."""
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
    """Build the error that a reply names; a code that this version does not know becomes a `ServiceError`."""
    return error_classes().get(code, ServiceError)(message, data=data)
