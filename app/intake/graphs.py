"""The request for a graph, read like that of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.intake.requests import RequestObject
from engine.graphs import MEMBERS, GraphCall, read_graph_call

__all__ = ["MEMBERS", "GraphRequest", "read_graph_request"]


@dataclass(frozen=True)
class GraphRequest(RequestObject):
    """A request for a graph, whose structure is valid; its `attributes` hold the graph itself."""

    call: GraphCall


def read_graph_request(request: Any) -> GraphRequest:
    """Read a request object; raises what `read_graph_call` raises."""
    call = read_graph_call(request)
    inputs, document = request.get("inputs"), {"graph": request.get("graph")}
    return GraphRequest("graph", call.rows, document, inputs or {}, request.get("options"), call)
