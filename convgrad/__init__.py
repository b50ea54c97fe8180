"""Exact, fast convolution gradients over HTTP: the client of the convgrad service.

>>> with convgrad.Client("http://127.0.0.1:8000") as client:  # doctest: +SKIP
...     dw = client.convolution_backward_weights(
...         src, diff_dst, weights_shape=(64, 32, 3, 3), strides=(1, 1), dilations=(1, 1),
...         auto_pad="same_upper", data_format="NCX", weights_format="OIX",
...     )
"""

# Before the imports: the client's User-Agent contains it.
__version__ = "0.1.0"

from convgrad._async_client import AsyncClient
from convgrad._client import Client
from convgrad._core import Inputs
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
from convgrad._events import Event, Health, Progress, Result, Tile
from convgrad._local import AsyncLocalClient, Local, LocalClient, local
from convgrad._operations import Attributes, TransposeAttributes
from convgrad._report import Report
from convgrad._retry import Retry
from convgrad._stream import AsyncStream, Stream
from convgrad._tensors import NpyFile, Tensor

__all__ = [
    "AsyncClient",
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
    "Local",
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
    "ServiceError",
    "ShuttingDown",
    "Stream",
    "Tensor",
    "Tile",
    "TimedOut",
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

# Make tracebacks and documentation show the public names.
for _name in __all__:
    if isinstance(_member := globals()[_name], type):
        _member.__module__ = __name__
del _name, _member
