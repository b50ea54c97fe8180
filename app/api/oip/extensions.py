"""Triton's model repository and shared memory extensions, under `/v2`.

The models are built in: loading one does nothing, and unloading one is an error. CUDA memory is not supported, but
clients that unregister it before they start, as Triton's examples for system memory do, succeed.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from app.api.oip.documents import repository_index
from app.api.oip.infer import OipState
from app.api.oip.regions import Regions
from app.api.routing import service_of
from app.http.exchange import exchange_of
from app.intake.strict_json import parse_document
from convgrad._errors import InvalidRequest, TooLarge, Unsupported
from schemas.tables import find_operation

__all__ = ["router"]

router = APIRouter(prefix="/v2")

# These requests have a name and three numbers at most.
_MOST_BYTES = 16 << 10


async def _document(request: Request) -> dict[str, Any]:
    """Read a small JSON object; an empty body counts as an empty object."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise TooLarge(f"the body of this request may have {_MOST_BYTES} bytes", data={"limit": _MOST_BYTES})
    document = parse_document(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    return document


def _regions(request: Request) -> Regions:
    state: OipState = request.app.state.oip
    return state.regions.of(exchange_of(request.scope).context.key)


@router.get("/repository/index")
@router.post("/repository/index")
async def index(request: Request) -> Any:
    """List every name of every operation, with its state; `ready` leaves out those that accept no calls."""
    only_ready = (await _document(request)).get("ready", False)
    if not isinstance(only_ready, bool):
        raise InvalidRequest("ready must be true or false")
    service = service_of(request)
    return repository_index(ready=service.status == "ready", only_ready=only_ready)


@router.post("/repository/models/{model}/load")
async def load(request: Request, model: str) -> Response:
    """Load a model; does nothing, since all models are built in."""
    find_operation(model)
    if (await _document(request)).get("parameters"):
        raise Unsupported("the operations are built in and can't be loaded with a configuration or files")
    return JSONResponse({})


@router.post("/repository/models/{model}/unload")
async def unload(_: Request, model: str) -> Response:
    """Refuse to unload a model."""
    raise Unsupported(f"{find_operation(model).called_as} is built in and can't be unloaded")


@router.get("/systemsharedmemory/status")
async def all_regions(request: Request) -> Any:
    """List the registered shared-memory regions."""
    return _regions(request).status()


@router.get("/systemsharedmemory/region/{region}/status")
async def one_region(request: Request, region: str) -> Any:
    """Describe one registered region."""
    return _regions(request).status(region)


@router.post("/systemsharedmemory/region/{region}/register")
async def register(request: Request, region: str) -> Any:
    """Register a part of a POSIX shared-memory object under a name, for tensors of later inferences."""
    given = await _document(request)
    _regions(request).register(region, given.get("key"), given.get("offset", 0), given.get("byte_size"))
    return {}


@router.post("/systemsharedmemory/unregister")
async def unregister_all(request: Request) -> Any:
    """Unregister all regions."""
    _regions(request).unregister()
    return {}


@router.post("/systemsharedmemory/region/{region}/unregister")
async def unregister(request: Request, region: str) -> Any:
    """Unregister one region."""
    _regions(request).unregister(region)
    return {}


@router.post("/cudasharedmemory/unregister")
async def unregister_cuda(request: Request) -> Any:
    """Unregister all CUDA regions, of which there are none."""
    _regions(request).status()
    return {}
