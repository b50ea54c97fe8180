"""The server of the protocol: tools, resources and the prompt over one kind of calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, ToolAnnotations

from convgrad import __version__
from convgrad._command.spec import OPERATIONS
from convgrad._mcp import texts
from convgrad._mcp.tools import Calls, Tools

__all__ = ["make_server"]

_INSTRUCTIONS = """Judges convolution kernels: forward, data, weight and bias gradients, exactly and by the element.
Tensors never travel in messages: give a handle, a path, or a seed with a shape. Begin with describe; verify one result,
or check a whole kernel with check_begin, check_next, check_submit and check_finish, whose record is signed."""
_READS = ("describe", "validate", "explain", "verify", "compute")
_WRITES = ("check_begin", "check_next", "check_submit", "check_finish")


class _Server(MCPServer[Any]):
    async def get_prompt(self, *given: Any, **named: Any) -> Any:
        """Return a prompt; raises `MCPError` for another name or other arguments, which is no internal error."""
        try:
            return await super().get_prompt(*given, **named)
        except ValueError as error:
            raise MCPError(INVALID_PARAMS, str(error)) from None


def make_server(calls: Calls) -> MCPServer[Any]:
    """Return the server."""
    server = _Server(
        "convgrad", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING", subscriptions=False
    )
    tools = Tools(calls)
    for name in (*_READS, *_WRITES):
        reads = ToolAnnotations(read_only_hint=name in _READS, open_world_hint=False)
        server.add_tool(getattr(tools, name), annotations=reads)
    kind = "text/markdown"

    for op in OPERATIONS:
        about = f"{op}: formula, attributes and layouts."
        server.resource(f"convgrad://operations/{op}", mime_type=kind, description=about)(_page_of(calls, op))
    server.resource("convgrad://faults", mime_type=kind, description="Published faults, with their issues.")(
        texts.faults
    )
    server.prompt("write_and_prove_a_kernel", description="Write a kernel and have a check prove it.")(_prompt)
    return server


def _page_of(calls: Calls, op: str) -> Callable[[], Awaitable[str]]:
    async def page() -> str:
        found: Any = await calls.call("ops.describe", {"op": op}, None, lambda *_: None)
        return texts.page(found)

    page.__name__ = op
    return page


def _prompt(op: str = "ConvolutionBackwardWeights", language: str = "Python with NumPy") -> str:
    return texts.prompt(op, language)
