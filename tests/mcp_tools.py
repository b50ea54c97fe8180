"""What the tests of the Model Context Protocol share: calls of tools, and a walk through all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from mcp import Client
from mcp_types import CallToolResult, TextContent

__all__ = ["ATTRIBUTES", "MODES", "OP", "SEEDS", "SHAPES", "call", "failed", "gradient", "long_verification", "walk"]

Array = npt.NDArray[Any]
Put = Callable[[str, Array], Awaitable[dict[str, Any]]]
"""Makes a tensor known to the server; returns its reference."""

Get = Callable[[Mapping[str, Any]], Awaitable[Array]]
"""Returns the tensor of a reference."""

MODES = {"legacy": "2025-11-25", "2026-07-28": "2026-07-28"}
"""How the official client connects, and the revision that both then speak."""

TOOLS = [
    "describe", "validate", "explain", "verify", "compute", "check_begin", "check_next", "check_submit", "check_finish",
]  # fmt: skip
OP = "ConvolutionBackwardWeights"
ATTRIBUTES = {"strides": [1, 1], "dilations": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1]} | {
    "data_format": "NCX",
    "weights_format": "OIX",
}
SHAPES = {"src": [2, 3, 6, 5], "diff_dst": [2, 4, 6, 5], "weights_shape": [4, 3, 3, 3]}
SEEDS = {
    "src": {"seed": 1, "shape": SHAPES["src"]},
    "diff_dst": {"seed": 2, "shape": SHAPES["diff_dst"]},
    "weights_shape": SHAPES["weights_shape"],
}


def drawn(seed: int, shape: list[int]) -> Array:
    """Return the tensor of a seed, as the schema of the tools describes it."""
    return np.random.default_rng(seed).integers(-8, 9, shape, "int8").astype(np.float32)


def gradient() -> Array:
    """Return the result of `OP` for `SEEDS`, tap by tap."""
    src, diff_dst = (drawn(number, SHAPES[name]) for number, name in ((1, "src"), (2, "diff_dst")))
    padded = np.pad(src, ((0, 0), (0, 0), (1, 1), (1, 1)))
    found = np.empty(SHAPES["weights_shape"], np.float32)
    for y, x in np.ndindex(3, 3):
        found[:, :, y, x] = np.einsum("nihw,nohw->oi", padded[:, :, y : y + 6, x : x + 5], diff_dst)
    return found


def long_verification(result: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of a verification of seconds, by default of a result from a seed."""
    shape, taps = [20, 64, 112, 112], [64, 64, 3, 3]
    inputs = {"src": {"seed": 1, "shape": shape}, "diff_dst": {"seed": 2, "shape": shape}, "weights_shape": taps}
    judged = {"result": result or {"seed": 3, "shape": taps}, "arithmetic": {"products": "tf32"}}
    return {"op": OP, "attributes": ATTRIBUTES, "inputs": inputs, **judged}


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool, which must not fail; return its structured result, which the client has validated."""
    found = await client.call_tool(tool, arguments)
    assert not found.is_error, found
    assert isinstance(found.structured_content, dict)
    return found.structured_content


async def failed(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool that must fail; return the error."""
    found = await client.call_tool(tool, arguments)
    assert found.is_error, found
    error: dict[str, Any] = (found.structured_content or {})["error"]
    assert error["message"] in text_of(found)
    return error


def text_of(result: CallToolResult) -> str:
    """Return the text of a result, which is one."""
    (text,) = [each.text for each in result.content if isinstance(each, TextContent)]
    return text


async def walk(client: Client, put: Put, get: Get) -> dict[str, Any]:
    """Use every tool, the resources and the prompt; return the outcome of the check."""
    listed = (await client.list_tools()).tools
    assert [tool.name for tool in listed] == TOOLS
    assert all(tool.output_schema for tool in listed)
    await _read(client)
    validated = await call(client, "validate", op=OP, attributes=ATTRIBUTES, inputs=SEEDS)
    assert validated["outputs"]["diff_weights"]["shape"] == SHAPES["weights_shape"]
    broken = await call(client, "validate", op=OP, attributes={**ATTRIBUTES, "strides": [0, 1]}, inputs=SEEDS)
    assert (broken["valid"], broken["errors"][0]["loc"]) == (False, ["attributes", "strides", 0])
    await _explained(client)
    await _verified(client, put, get)
    return await _checked(client, put, get)


async def _read(client: Client) -> None:
    operations = (await call(client, "describe"))["operations"]
    uris = [str(each.uri) for each in (await client.list_resources()).resources]
    assert {*uris} == {"convgrad://faults", *(f"convgrad://operations/{each['op']}" for each in operations)}
    described = (await call(client, "describe", op=OP))["operation"]
    page: Any = (await client.read_resource(f"convgrad://operations/{OP}")).contents[0]
    assert all(f"`{row['name']}`" in page.text for row in described["attributes"])
    faults: Any = (await client.read_resource("convgrad://faults")).contents[0]
    assert "https://github.com/pytorch/pytorch/issues/68868" in faults.text
    (prompt,) = (await client.list_prompts()).prompts
    asked: Any = (await client.get_prompt(prompt.name, {"op": OP})).messages[0].content
    assert f'op="{OP}"' in asked.text


async def _explained(client: Client) -> None:
    inputs = {name: shape if name == "weights_shape" else {"shape": shape} for name, shape in SHAPES.items()}
    found = await client.call_tool(
        "explain", {"op": OP, "attributes": ATTRIBUTES, "inputs": inputs, "element": [1, 0, 0, 2]}
    )
    assert [each.type for each in found.content] == ["text", "image"]
    assert isinstance(found.structured_content, dict)
    rows, columns = found.structured_content["sums"]
    assert found.structured_content["terms"] == 2 * 5 * 4  # images, rows and columns whose tap meets no padding
    assert (rows["src"], rows["dst"]) == ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert (columns["src"], columns["dst"]) == ([1, 2, 3, 4], [0, 1, 2, 3])


async def _verified(client: Client, put: Put, get: Get) -> None:
    asked: dict[str, Any] = {"op": OP, "attributes": ATTRIBUTES, "inputs": SEEDS}
    steps: list[tuple[float, float | None]] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append((progress, total))

    right = gradient()
    found = await client.call_tool("verify", {**asked, "result": await put("right", right)}, progress_callback=progress)
    assert (found.structured_content or {})["passed"], found
    assert steps
    assert all(done <= (total or 0) for done, total in steps)
    wrong = right.copy()
    wrong[1, :, 0, 2] = 0
    report = await call(client, "verify", **asked, result=await put("wrong", wrong))
    assert (report["passed"], report["rule"]["measured"], report["rule"]["limit"]) == (False, 3.0, 0.0)
    assert report["reason"].startswith("all 3 wrong elements have dst channel = 1, tap y = 0 and tap x = 2")
    assert report["element"]["index"][0] == 1
    computed = await call(client, "compute", **asked)
    assert (await get(computed["outputs"]["diff_weights"])).tobytes() == right.tobytes()


async def _checked(client: Client, put: Put, get: Get) -> dict[str, Any]:
    takes = {"ops": ["BiasAdd"], "dtypes": ["f32"], "data_formats": ["NCX"], "empty": False}
    begun = await call(client, "check_begin", takes=takes, cases=3, label="mine", digest="sha256:" + "ab" * 32)
    check = begun["check"]
    while (case := await call(client, "check_next", check=check))["case"] is not None:
        given = {name: await get(reference) for name, reference in case["inputs"].items()}
        with np.errstate(all="ignore"):
            result = given["src"] + given["bias"].reshape(-1, *[1] * (given["src"].ndim - 2))
        if case["case"] == 2:
            verdict = await call(client, "check_submit", check=check, case=2, outcome="unsupported")
            assert verdict["outcome"] == "unsupported"
        else:
            verdict = await call(
                client, "check_submit", check=check, case=case["case"], result=await put("result", result)
            )
            assert verdict["passed"]
    outcome = await call(client, "check_finish", check=check)
    assert (outcome["verdict"], outcome["counts"]["passed"]) == ("incomplete", 2)
    return outcome
