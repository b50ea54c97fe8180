"""The tools: each is a method of `/rpc`, with references in place of tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Annotated, Any, Protocol, TypeVar

from mcp.server.mcpserver import Context
from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent
from pydantic import BaseModel

from convgrad._core import output_of
from convgrad._errors import ConvgradError, InvalidParams
from convgrad._mcp import texts
from convgrad._mcp.explain import drawing, explanation
from convgrad._mcp.records import (
    Attributes,
    Begun,
    Computed,
    Described,
    Explained,
    Inputs,
    NextCase,
    Signed,
    TensorRef,
    Validated,
    Verdict,
)

__all__ = ["Calls", "OnProgress", "Tools"]

OnProgress = Callable[[int, int], object]
"""Called with the number of units that are done, and of all."""

Method = TypeVar("Method", bound=Callable[..., Awaitable[CallToolResult]])


class Calls(Protocol):
    """The methods of `/rpc` by name, and operations; raises their errors."""

    async def call(
        self, method: str, params: dict[str, Any], request: Any, on_progress: OnProgress
    ) -> dict[str, Any] | list[Any]:
        """Return the result; tensors are references, and a record has its place in `record`.

        `request` is that of HTTP, if any.
        """


def _reporting(tool: Method) -> Method:
    """Return errors of the project as results, which a model can act on."""

    @wraps(tool)
    async def called(*given: Any, **named: Any) -> CallToolResult:
        try:
            return await tool(*given, **named)
        except ConvgradError as error:
            found = {"code": error.code, "message": error.message, "errors": error.data.get("errors", [])}
            text = TextContent(type="text", text=texts.failure(error))
            return CallToolResult(content=[text], structured_content={"error": found}, is_error=True)

    return called  # type: ignore[return-value] # it has the same parameters


class Tools:
    """The tools over one kind of `Calls`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def _call(self, ctx: Context, method: str, params: dict[str, Any]) -> Any:
        """Run a method in a separate task and report its progress; cancelling the request cancels it."""
        steps, last = asyncio.Queue[tuple[int, int] | None](), -1

        def step(done: int, total: int) -> None:
            nonlocal last
            if (percent := 100 * done // max(1, total)) > last:
                last = percent
                steps.put_nowait((done, total))

        work = asyncio.ensure_future(self._calls.call(method, params, ctx.request_context.request, step))
        work.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (found := await steps.get()) is not None:
                await ctx.report_progress(*found)
        finally:
            work.cancel()  # one that is done stays as it is
        return work.result()

    @_reporting
    async def describe(self, ctx: Context, op: str | None = None) -> Annotated[CallToolResult, Described]:
        """List the operations, or describe one: its attributes with defaults, inputs, outputs and layouts."""
        if op is None:
            listed = await self._call(ctx, "ops.list", {})
            return _result(Described(operations=listed), texts.operations(listed))
        found = await self._call(ctx, "ops.describe", {"op": op})
        return _result(Described(operation=found), texts.operation(found))

    @_reporting
    async def validate(
        self, ctx: Context, op: str, attributes: Attributes, inputs: Inputs
    ) -> Annotated[CallToolResult, Validated]:
        """Check attributes and shapes without computing: output shapes and resolved attributes, or every broken rule.

        Inputs may be just dtype and shape.
        """
        try:
            found = await self._call(ctx, "ops.validate", _params(op, attributes, inputs))
        except InvalidParams as error:
            return _result(Validated(valid=False, errors=error.errors), texts.failure(error))
        valid = Validated(valid=True, **{name: found[name] for name in ("outputs", "resolved", "plan")})
        return _result(valid, texts.valid(found))

    @_reporting
    async def explain(
        self, ctx: Context, op: str, attributes: Attributes, inputs: Inputs, element: list[int]
    ) -> Annotated[CallToolResult, Explained]:
        """Say which products one element of the output sums, by index, with a drawing of the positions it reads.

        Inputs may be just dtype and shape.
        """
        described = await self._call(ctx, "ops.describe", {"op": op})
        if described["dialect"] != "new":
            raise InvalidParams(f"explain takes the names of {described['operation']}")
        params = _params(op, attributes, inputs)
        found = await self._call(ctx, "ops.validate", params)
        shapes = {
            name: each if isinstance(each, list) else each.get("shape") for name, each in params["inputs"].items()
        }
        explained = explanation(described, found, shapes, element)
        return _result(Explained(**explained), explained["text"], drawing(explained))

    @_reporting
    async def verify(
        self,
        ctx: Context,
        op: str,
        attributes: Attributes,
        inputs: Inputs,
        result: TensorRef,
        output: str | None = None,
        arithmetic: dict[str, Any] | None = None,
    ) -> Annotated[CallToolResult, Verdict]:
        """Judge a kernel's result by the exact one: passed, or the broken rule, the cause, the place and an element.

        `arithmetic` is what the kernel declares, such as {"products": "tf32"}; by default f32 products and sums.
        """
        name = output or output_of(op, await self._call(ctx, "ops.list", {}))
        params = _params(op, attributes, inputs)
        params["inputs"][name] = result.given()
        params["options"] = {"arithmetic": arithmetic} if arithmetic else {}
        return _verdict(await self._call(ctx, "ops.verify", params))

    @_reporting
    async def compute(
        self, ctx: Context, op: str, attributes: Attributes, inputs: Inputs, outputs: list[str] | None = None
    ) -> Annotated[CallToolResult, Computed]:
        """Compute an operation; returns references to its outputs, by default the first."""
        params = _params(op, attributes, inputs)
        params["options"] = {"outputs": outputs} if outputs else {}
        found = await self._call(ctx, params.pop("op"), params)
        members = {name: found[name] for name in ("outputs", "resolved", "stats")}
        return _result(Computed(**members), texts.computed(found))

    @_reporting
    async def check_begin(
        self,
        ctx: Context,
        takes: dict[str, Any] | None = None,
        cases: int = 20,
        label: str | None = None,
        digest: str | None = None,
        arithmetic: dict[str, Any] | None = None,
    ) -> Annotated[CallToolResult, Begun]:
        """Begin a check of a whole kernel: cases are drawn and judged here, and the record of all is signed.

        `takes` is what the kernel takes: lists of `ops`, `dtypes`, `ranks`, `data_formats`, `weights_formats`, and true
        or false for `strides`, `dilations`, `pads`, `uneven_pads`, `groups`, `bias`, `empty`. `digest` is sha256: and
        that of the kernel, for the record.
        """
        params = {"takes": takes, "cases": cases, "label": label, "digest": digest, "arithmetic": arithmetic}
        found = await self._call(ctx, "check.begin", params)
        begun = Begun(**{name: found[name] for name in Begun.model_fields if name in found})
        return _result(begun, f"check {begun.check} has begun: call check_next, then check_submit, until case is null")

    @_reporting
    async def check_next(self, ctx: Context, check: str, send: str = "tensors") -> Annotated[CallToolResult, NextCase]:
        """Return the next case: run the kernel on its inputs and submit the result. send="seed" gives a seed."""
        found = await self._call(ctx, "check.next", {"check": check, "send": send})
        case = NextCase(**{name: found[name] for name in NextCase.model_fields if name in found})
        return _result(case, texts.case(case.model_dump()))

    @_reporting
    async def check_submit(
        self, ctx: Context, check: str, case: int, result: TensorRef | None = None, outcome: str | None = None
    ) -> Annotated[CallToolResult, Verdict]:
        """Submit the result of a case and get the verdict; or the outcome "unsupported" or "failed" in its place."""
        params: dict[str, Any] = {"check": check, "case": case, "outcome": outcome}
        if result is not None:
            params["inputs"] = {"result": result.given()}
        found = await self._call(ctx, "check.submit", params)
        if "outcome" not in found:
            return _verdict(found)
        return _result(Verdict(passed=False, outcome=found["outcome"]), f"noted: case {case} {found['outcome']}")

    @_reporting
    async def check_finish(self, ctx: Context, check: str) -> Annotated[CallToolResult, Signed]:
        """End a check; returns its verdict, and where the signed record is."""
        found = await self._call(ctx, "check.finish", {"check": check})
        failed = [case for case in found["cases"] if case["status"] != "passed"][:10]
        signed = Signed(**{**{name: found.get(name) for name in Signed.model_fields}, "failed": failed})
        return _result(signed, texts.signed(found))


def _params(op: str, attributes: dict[str, Any], inputs: dict[str, TensorRef | list[int]]) -> dict[str, Any]:
    given = {name: each if isinstance(each, list) else each.given() for name, each in inputs.items()}
    return {"op": op, "attributes": attributes, "inputs": given}


def _verdict(report: dict[str, Any]) -> CallToolResult:
    found = texts.verdict(report)
    return _result(Verdict(**found), texts.finding(report))


def _result(structured: BaseModel, text: str, png: str | None = None) -> CallToolResult:
    content: list[ContentBlock] = [TextContent(type="text", text=text)]
    if png is not None:
        content.append(ImageContent(type="image", data=png, mime_type="image/png"))
    return CallToolResult(content=content, structured_content=structured.model_dump(mode="json"))
