"""Exact, fast convolution gradients over HTTP: the client of the convgrad service.

>>> with convgrad.Client("http://127.0.0.1:8000") as client:  # doctest: +SKIP
...     dw = client.convolution_backward_weights(
...         src, diff_dst, weights_shape=(64, 32, 3, 3), strides=(1, 1), dilations=(1, 1),
...         auto_pad="same_upper", data_format="NCX", weights_format="OIX",
...     )
"""

# Before the imports: the client's User-Agent contains it.
__version__ = "0.1.0"

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from convgrad._errors import (
    BrokenStream,
    CallerError,
    Cancelled,
    ConnectFailed,
    ConvgradError,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    InvalidParams,
    InvalidRequest,
    MethodNotAllowed,
    NotAcceptable,
    NotFound,
    Overloaded,
    ParseError,
    ProtocolError,
    RateLimited,
    ServiceError,
    ShuttingDown,
    TimedOut,
    TooLarge,
    TransportError,
    Unauthorised,
    UnknownOperation,
    Unsupported,
    UnsupportedMediaType,
    WorkerLost,
)

if TYPE_CHECKING:
    from convgrad._async_client import AsyncClient
    from convgrad._client import Client
    from convgrad._events import Event, Health, Progress, Result, Tile
    from convgrad._jobs import AsyncJob, Job
    from convgrad._local import AsyncLocalClient, LocalClient, local
    from convgrad._operations import Attributes, TransposeAttributes
    from convgrad._report import Report
    from convgrad._requests import Inputs
    from convgrad._retry import Retry
    from convgrad._sealed import SealedCase
    from convgrad._stream import AsyncStream, Stream
    from convgrad._tensors import NpyFile, Tensor
    from convgrad._tolerance import Tolerance

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncLocalClient",
    "AsyncStream",
    "Attributes",
    "BrokenStream",
    "CallerError",
    "Cancelled",
    "Client",
    "ConnectFailed",
    "ConvgradError",
    "DeadlineExceeded",
    "Event",
    "Forbidden",
    "Health",
    "Inputs",
    "InternalError",
    "InvalidParams",
    "InvalidRequest",
    "Job",
    "LocalClient",
    "MethodNotAllowed",
    "NotAcceptable",
    "NotFound",
    "NpyFile",
    "Overloaded",
    "ParseError",
    "Progress",
    "ProtocolError",
    "RateLimited",
    "Report",
    "Result",
    "Retry",
    "SealedCase",
    "ServiceError",
    "ShuttingDown",
    "Stream",
    "Tensor",
    "Tile",
    "TimedOut",
    "Tolerance",
    "TooLarge",
    "TransportError",
    "TransposeAttributes",
    "Unauthorised",
    "UnknownOperation",
    "Unsupported",
    "UnsupportedMediaType",
    "WorkerLost",
    "__version__",
    "local",
]

_MODULES = {
    "_async_client": ["AsyncClient"],
    "_client": ["Client"],
    "_events": ["Event", "Health", "Progress", "Result", "Tile"],
    "_jobs": ["AsyncJob", "Job"],
    "_local": ["AsyncLocalClient", "LocalClient", "local"],
    "_operations": ["Attributes", "TransposeAttributes"],
    "_report": ["Report"],
    "_requests": ["Inputs"],
    "_retry": ["Retry"],
    "_sealed": ["SealedCase"],
    "_stream": ["AsyncStream", "Stream"],
    "_tensors": ["NpyFile", "Tensor"],
    "_tolerance": ["Tolerance"],
}
"""Modules imported when one of their names is first used: the service, which needs none, starts without httpx."""


def _show_as_public(*names: str) -> None:
    """Make tracebacks and documentation show the public names."""
    for name in names:
        if isinstance(member := globals()[name], type):
            member.__module__ = __name__


_show_as_public(*(name for name in __all__ if name in globals()))

if not TYPE_CHECKING:  # which would take every name for one of ours

    def __getattr__(name: str) -> object:
        """Import the client and everything that belongs to it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for module, names in _MODULES.items():
            found = _import_module(f"{__name__}.{module}")
            globals().update({each: getattr(found, each) for each in names})
            _show_as_public(*names)
        return globals()[name]

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
