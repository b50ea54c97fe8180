"""The `/v2` API: the Open Inference Protocol with Triton's extensions, for `tritonclient` and similar clients.

A model is an operation under one of its names; each has one version. The attributes of a call are the parameters of
its request. The models are built in: loading one does nothing, and unloading one is an error.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from app.api.answer import answer
from app.api.oip.infer import VERSION, Inference, OipState
from app.api.oip.regions import Regions
from app.api.pages import not_ready_headers
from app.api.routing import service_of
from app.http.exchange import exchange_of
from app.intake.body import parse_text
from convgrad import __version__
from convgrad._dtypes import dtype
from convgrad._errors import InvalidRequest, NotFound, TooLarge, UnknownOperation, Unsupported
from schemas.broken_rules import safe_key, safe_text
from schemas.rows import DTYPE_NAMES, REFERENCE_DTYPES, TensorRow
from schemas.tables import CalledOperation, find_operation, operation_names

__all__ = ["OipState", "router"]

router = APIRouter(prefix="/v2")

# Requests of the extensions have a name and three numbers at most.
_MOST_BYTES = 16 << 10


def find_model(name: str, version: str | None = None) -> CalledOperation:
    """Return the operation of a model; raises `UnknownOperation` for an unknown name or version."""
    called = find_operation(name)
    if version not in (None, VERSION):
        shown = f"version {safe_text(version)}"
        raise UnknownOperation(f"the model {called.called_as} has no {shown}: the only one is {VERSION}")
    return called


@router.get("")
@router.get("/")
async def server(request: Request) -> Any:
    """Describe the server and its extensions."""
    shared = ("system_shared_memory",) if service_of(request).settings.oip_shared_memory else ()
    return {"name": "convgrad", "version": __version__, "extensions": sorted([*_EXTENSIONS, *shared])}


@router.get("/health/live")
async def live(_: Request) -> Any:
    """Tell whether the server answers."""
    return {"live": True}


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """Tell whether calls are accepted: 503 while the service is starting, failed or draining."""
    return _readiness(request, {"live": True})


@router.get("/models/stats")
@router.get("/models/{model}/stats")
@router.get("/models/{model}/versions/{version}/stats")
async def statistics(request: Request, model: str | None = None, version: str | None = None) -> Any:
    """Report the statistics of a model, or of every one."""
    names = operation_names() if model is None else [find_model(model, version).called_as]
    return {"model_stats": [_state(request).statistics.report(name, VERSION) for name in names]}


@router.get("/models/{model}")
@router.get("/models/{model}/versions/{version}")
async def metadata(_: Request, model: str, version: str | None = None) -> Any:
    """Describe a model's inputs and outputs."""
    return _model_metadata(find_model(model, version))


@router.get("/models/{model}/ready")
@router.get("/models/{model}/versions/{version}/ready")
async def model_ready(request: Request, model: str, version: str | None = None) -> Response:
    """Tell whether a model accepts calls."""
    return _readiness(request, {"name": find_model(model, version).called_as})


@router.get("/models/{model}/config")
@router.get("/models/{model}/versions/{version}/config")
async def config(request: Request, model: str, version: str | None = None) -> Any:
    """Return a model's configuration, which includes its attributes."""
    return _model_config(find_model(model, version), service_of(request).settings.worker_count)


@router.post("/models/{model}/infer")
@router.post("/models/{model}/versions/{version}/infer")
async def infer(request: Request, model: str, version: str | None = None) -> None:
    """Compute an operation: JSON, optionally followed by the bytes of the tensors, in request and reply."""
    called, exchange, state, timings = find_model(model, version), exchange_of(request.scope), _state(request), None
    task = Inference(service_of(request), called, state, exchange)
    try:
        await answer(exchange, task, task.decode, task.encode)
        timings = exchange.context.timings
    finally:
        state.statistics.count(called.called_as, exchange.context.age(), timings)


# Triton's model repository and shared memory extensions.


async def _document(request: Request) -> dict[str, Any]:
    """Read a small JSON object; an empty body counts as an empty object."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise TooLarge(f"this body may have at most {_MOST_BYTES} bytes", data={"limit": _MOST_BYTES})
    document = parse_text(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    return document


def _regions(request: Request) -> Regions:
    return _state(request).regions(exchange_of(request.scope).context.key)


@router.get("/repository/index")
@router.post("/repository/index")
async def index(request: Request) -> Any:
    """List every name of every operation, with its state; `ready` leaves out those that accept no calls."""
    only_ready = (await _document(request)).get("ready", False)
    if not isinstance(only_ready, bool):
        raise InvalidRequest("ready must be true or false")
    is_ready = service_of(request).status == "ready"
    if only_ready and not is_ready:
        return []
    state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", "the service accepts no calls now")
    return [{"name": name, "version": VERSION, "state": state, "reason": reason} for name in operation_names()]


@router.post("/repository/models/{model}/load")
async def load(request: Request, model: str) -> Any:
    """Load a model; does nothing, since all models are built in."""
    find_operation(model)
    if (await _document(request)).get("parameters") not in (None, {}):
        raise Unsupported("the operations are built in and can't be loaded with a configuration or files")
    return {}


@router.post("/repository/models/{model}/unload")
async def unload(_: Request, model: str) -> Response:
    """Refuse to unload a model."""
    raise Unsupported(f"{find_operation(model).called_as} is built in and can't be unloaded")


@router.get("/systemsharedmemory/status")
@router.get("/systemsharedmemory/region/{region}/status")
async def region_status(request: Request, region: str | None = None) -> Any:
    """Describe a registered region, or all."""
    regions = _regions(request)
    if region is not None and region not in regions:
        raise NotFound(f"there is no shared memory region {safe_key(region)}")
    return [each.describe() for each in (regions.values() if region is None else (regions[region],))]


@router.post("/systemsharedmemory/region/{region}/register")
async def register(request: Request, region: str) -> Any:
    """Register a part of a POSIX shared-memory object under a name, for tensors of later inferences."""
    given = await _document(request)
    _regions(request).register(region, given.get("key"), given.get("offset", 0), given.get("byte_size"))
    return {}


@router.post("/systemsharedmemory/unregister")
@router.post("/systemsharedmemory/region/{region}/unregister")
async def unregister(request: Request, region: str | None = None) -> Any:
    """Unregister a region, or all."""
    regions = _regions(request)
    for name in list(regions) if region is None else [region]:
        regions.pop(name, None)
    return {}


def _state(request: Request) -> OipState:
    state: OipState = request.app.state.oip
    return state


def _readiness(request: Request, about: dict[str, Any]) -> Response:
    status = service_of(request).status
    if status == "ready":
        return JSONResponse(about | {"ready": True})
    service = service_of(request)
    error = service.starting().message if status == "starting" else f"the service is {status}"
    return JSONResponse(about | {"ready": False, "error": error}, 503, not_ready_headers(service))


_PLATFORM = "convgrad"
_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics")
# An operation has one to three spatial axes, but the protocol can state one rank only: that of two axes.
_RANK = 4


def _model_metadata(called: CalledOperation) -> dict[str, Any]:
    """Describe a model, an operation under one of its names, in the dialect of that name."""
    return {
        "name": called.called_as,
        "versions": [VERSION],
        "platform": _PLATFORM,
        "inputs": [_metadata(called, row) for row in called.operation.inputs],
        "outputs": [_metadata(called, row) for row in called.operation.outputs],
    }


def _model_config(called: CalledOperation, workers: int) -> dict[str, Any]:
    """Return a model's configuration as Triton's `ModelConfig`, with the attributes under `parameters`."""
    operation = called.operation
    inputs = [
        {
            **_config(called, row),
            "format": "FORMAT_NONE",
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            # The weights' shape may be a parameter instead.
            "optional": not row.required,
        }
        for row in operation.inputs
    ]
    parameters = {row.spelled(called.dialect): f"{row.kind}: {row.doc}" for row in operation.attributes}
    parameters |= {
        "datatypes": ", ".join(dtype(name).oip for name in DTYPE_NAMES),
        "reference": "bool: use the slow kernel that accumulates in float64; it alone computes "
        + ", ".join(dtype(name).oip for name in REFERENCE_DTYPES),
        "reproducible": "bool: the same bits on every kind of processor",
        "algorithm": "string: direct, winograd or auto, how convolutions and gradients are summed; direct by default",
        "dims": f"data tensors have {', '.join(map(str, operation.ranks))} dimensions; dims shows {_RANK}",
        "formula": operation.formula,
    }
    return {
        "name": called.called_as,
        "platform": _PLATFORM,
        "backend": _PLATFORM,
        "version_policy": {"specific": {"versions": [int(VERSION)]}},
        "max_batch_size": 0,
        "input": inputs,
        "output": [
            {**_config(called, row), "label_filename": "", "is_shape_tensor": False} for row in operation.outputs
        ],
        "instance_group": [{"name": called.called_as, "kind": "KIND_CPU", "count": workers}],
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
        "model_transaction_policy": {"decoupled": False},
    }


def _datatype(row: TensorRow) -> str:
    return "FP32" if row.dtypes == "T" else "INT64"


def _dims(row: TensorRow) -> list[int]:
    return [-1] if row.dtypes != "T" or row.name in ("bias", "diff_bias") else [-1] * _RANK


def _metadata(called: CalledOperation, row: TensorRow) -> dict[str, Any]:
    return {"name": row.spelled(called.dialect), "datatype": _datatype(row), "shape": _dims(row)}


def _config(called: CalledOperation, row: TensorRow) -> dict[str, Any]:
    return {"name": row.spelled(called.dialect), "data_type": f"TYPE_{_datatype(row)}", "dims": _dims(row)}
