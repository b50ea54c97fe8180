"""A program without a model that repairs a kernel with the tools of the Model Context Protocol alone.

It gets a weight gradient of a transposed convolution in NumPy with one of ten seeded bugs. It runs the kernel on a few
small calls, has each result judged by `verify`, reads the structured findings, and changes the line that they point
to; when all pass, a check of cases that it did not choose proves the kernel.

    python examples/agent_repairs_kernel.py --bug group_offset
    python examples/agent_repairs_kernel.py
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mcp import Client
from mcp.client.stdio import StdioServerParameters

Array = np.ndarray[Any, Any]
Finding = dict[str, Any]
Findings = Mapping[str, Finding]

OP = "ConvTransposeBackwardWeights"

KERNEL = """
import numpy as np

def kernel(src, diff_dst, weights_shape, strides, dilations, pads_begin, pads_end, groups, output_padding):
    out, channels, *taps = weights_shape
    found = np.zeros(weights_shape, np.float32)
    pads = pads_begin
    wide = diff_dst.shape[2:]
    for channel in range(channels):
        group = channel // (channels // groups)
        block = diff_dst[:, group * out : (group + 1) * out]
        for tap in list(np.ndindex(*taps)):
            a, b = src[:, channel], block
            for axis in range(len(taps)):
                step, gap = strides[axis], dilations[axis]
                places = np.arange(a.shape[axis + 1])
                where = places * step - pads[axis] + tap[axis] * gap
                inside = (where >= 0) & (where < wide[axis])
                a, b = a.compress(inside, axis + 1), b.take(where[inside], axis + 2)
            products = a[:, None].astype(np.float64) * b
            found[(slice(None), channel, *tap)] = products.sum(dtype=np.float64, axis=(0, *range(2, products.ndim)))
    return found
"""

BUGS = {
    "pad_side": ("pads = pads_begin", "pads = pads_end"),
    "stride_dilation": ("step, gap = strides[axis], dilations[axis]", "step, gap = dilations[axis], strides[axis]"),
    "last_row": ("inside = (where >= 0) & (where < wide[axis])",
                 "inside = (where >= 0) & (where < wide[axis]) & (places < places.size - (axis == 0))"),
    "group_offset": ("block = diff_dst[:, group * out : (group + 1) * out]", "block = diff_dst[:, :out]"),
    "narrow_sum": ("products.sum(dtype=np.float64", "products.sum(dtype=np.float16"),
    "missing_tap": ("for tap in list(np.ndindex(*taps)):", "for tap in list(np.ndindex(*taps))[:-1]:"),
    "channels": ("return found", "return found.swapaxes(0, 1).reshape(found.shape)"),
    "output_padding": ("wide = diff_dst.shape[2:]",
                       "wide = [size - more for size, more in zip(diff_dst.shape[2:], output_padding)]"),
    "batch": ("a, b = src[:, channel], block", "a, b = src[:1, channel], block[:1]"),
    "border": ("inside = (where >= 0) & (where < wide[axis])", "inside = (where > 0) & (where < wide[axis])"),
}  # fmt: skip
"""The seeded bugs: the right line and the wrong one."""

PLAIN: dict[str, Any] = {
    "n": 2, "channels": (4, 6), "size": (5, 6), "taps": (3, 3), "strides": [1, 1], "dilations": [1, 1],
    "pads_begin": [0, 0], "pads_end": [0, 0], "groups": 1, "output_padding": [0, 0],
}  # fmt: skip
PROBES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row": {"size": (1, 6)},
    "pads": {"pads_begin": [1, 0], "pads_end": [0, 1]},
    "strides": {"strides": [2, 3]},
    "dilations": {"dilations": [2, 2]},
    "groups": {"groups": 2},
    "output padding": {"strides": [3, 3], "pads_begin": [1, 1], "pads_end": [1, 1], "output_padding": [1, 1]},
    "long sums": {"size": (40, 40)},
}
"""The calls that are tried, as what they change in the plain one."""


def only(findings: Findings, *names: str) -> bool:
    """Whether exactly these calls have failed."""
    return {name for name, found in findings.items() if not found["passed"]} == {*names}


def said(findings: Findings, words: str) -> bool:
    """Whether a finding has these words in its hints or in what the wrong elements have in common."""
    texts = [[*found["hints"], (found["where"] or {}).get("text", "")] for found in findings.values()]
    return any(words in text for each in texts for text in each)


RULES: dict[str, tuple[str, Callable[[Findings], bool]]] = {
    "pad_side": ("a hint says that the pads are exchanged", lambda f: said(f, "pads_end were exchanged")),
    "channels": ("a hint says that the result has another layout", lambda f: said(f, "has the layout IOX")),
    "batch": ("a hint says that an image is left out", lambda f: said(f, "image 1 of 2 is left out")),
    "missing_tap": ("the wrong elements are one tap, and zero", lambda f: said(f, "tap x = 2, and they are 0")),
    "group_offset": ("only groups fail, in the channels after the first group", lambda f: only(f, "groups")),
    "narrow_sum": ("only long sums fail", lambda f: only(f, "long sums")),
    "output_padding": ("only output padding fails", lambda f: only(f, "output padding")),
    "stride_dilation": ("what fails is that where strides and dilations differ",
                        lambda f: only(f, "strides", "dilations", "output padding")),
    "last_row": ("everything fails, and of a single row nothing is left",
                 lambda f: (f["one row"]["where"] or {}).get("alike") == "0"),
    "border": ("everything fails, without another reason", lambda f: not f["plain"]["passed"]),
}  # fmt: skip
"""The findings that identify each bug, tried in this order."""


class Agent:
    """Repairs one kernel; `folder` is the one that the server may read."""

    def __init__(self, client: Client, folder: Path, source: str) -> None:
        self.client = client
        self.folder = folder
        self.source = source

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool; return its structured result."""
        found = await self.client.call_tool(tool, arguments)
        if found.is_error or not isinstance(found.structured_content, dict):
            raise RuntimeError(f"{tool}: {found.content}")
        return found.structured_content

    def run(self, attributes: Mapping[str, Any], inputs: Mapping[str, Array], shape: list[int]) -> dict[str, str]:
        """Run the kernel as it is now, and write its result where the server may read it; return the reference."""
        names = ("strides", "dilations", "pads_begin", "pads_end", "groups", "output_padding")
        space: dict[str, Any] = {}
        exec(self.source, space)
        with np.errstate(all="ignore"):
            result = space["kernel"](**inputs, weights_shape=shape, **{name: attributes[name] for name in names})
        np.save(self.folder / "result.npy", result)
        return {"path": "result.npy"}

    async def probe(self, changed: Mapping[str, Any]) -> Finding:
        """Have the kernel's result of one small call judged."""
        attributes, shapes, weights = call_of({**PLAIN, **changed})
        seeds: dict[str, dict[str, Any]] = {
            name: {"seed": number, "shape": shape} for number, (name, shape) in enumerate(shapes.items())
        }
        inputs = {name: drawn(each["seed"], each["shape"]) for name, each in seeds.items()}
        result = self.run(attributes, inputs, weights)
        given = {**seeds, "weights_shape": weights}
        return await self.call("verify", op=OP, attributes=attributes, inputs=given, result=result)

    async def repair(self) -> str | None:
        """Judge the kernel; return the name of the bug whose line was changed, or None if nothing is wrong."""
        findings = {name: await self.probe(changed) for name, changed in PROBES.items()}
        for name, found in findings.items():
            if not found["passed"]:
                rule = found["rule"]
                text = f"{rule['rule']}: measured {rule['measured']:g}, limit {rule['limit']:g}; {found['reason']}"
                print(f"  verify {name}: FAILED, {text}")
        if all(found["passed"] for found in findings.values()):
            return None
        bug, (why, _) = next((bug, rule) for bug, rule in RULES.items() if rule[1](findings))
        right, wrong = BUGS[bug]
        print(f"  diagnosis {bug}: {why}")
        if wrong not in self.source:
            raise RuntimeError("the kernel has no such line")
        self.source = self.source.replace(wrong, right)
        return bug

    async def prove(self, cases: int) -> dict[str, Any]:
        """Check the kernel on cases that the server draws; return the signed outcome."""
        takes = {"ops": [OP], "dtypes": ["f32"], "ranks": [2], "data_formats": ["NCX"], "weights_formats": ["OIX"]}
        digest = f"sha256:{hashlib.sha256(self.source.encode()).hexdigest()}"
        begun = await self.call("check_begin", takes=takes, cases=cases, label="repaired", digest=digest)
        while (case := await self.call("check_next", check=begun["check"]))["case"] is not None:
            inputs = {name: np.load(self.folder / each["path"]) for name, each in case["inputs"].items()}
            ((_, output),) = case["outputs"].items()
            result = self.run(case["attributes"], inputs, output["shape"])
            await self.call("check_submit", check=begun["check"], case=case["case"], result=result)
        return await self.call("check_finish", check=begun["check"])


def call_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[int]], list[int]]:
    """Return attributes, the shapes of src and diff_dst, and that of the weights."""
    sizes = ("size", "strides", "taps", "dilations", "pads_begin", "pads_end", "output_padding")
    axes = zip(*(given[name] for name in sizes), strict=True)
    wide = [
        (n - 1) * stride + (tap - 1) * gap + 1 - begin - end + more for n, stride, tap, gap, begin, end, more in axes
    ]
    src, dst = given["channels"]
    names = ("strides", "dilations", "pads_begin", "pads_end", "groups", "output_padding")
    attributes = {name: given[name] for name in names} | {"data_format": "NCX", "weights_format": "OIX"}
    shapes = {"src": [given["n"], src, *given["size"]], "diff_dst": [given["n"], dst, *wide]}
    return attributes, shapes, [dst // given["groups"], src, *given["taps"]]


def drawn(seed: int, shape: list[int]) -> Array:
    """Return the tensor of a seed, by the formula in the schema of the tools."""
    return np.random.default_rng(seed).integers(-8, 9, shape, "int8").astype(np.float32)


async def repaired(bug: str, cases: int) -> tuple[str | None, dict[str, Any]]:
    """Repair the kernel with a bug and prove it; return the diagnosis and the outcome of the check."""
    print(f"kernel with the bug {bug}")
    right, wrong = BUGS[bug]
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "convgrad", "mcp", "--root", folder]
        async with Client(StdioServerParameters(command=sys.executable, args=command)) as client:
            agent = Agent(client, Path(folder), KERNEL.replace(right, wrong))
            found = await agent.repair()
            while await agent.repair() is not None:
                pass
            print("  verify: all calls passed")
            outcome = await agent.prove(cases)
    print(f"  check: {outcome['verdict']}, {outcome['counts']}, key {outcome['signature']['key_id']}")
    return found, outcome


def main() -> int:
    """Repair kernels; return 0 if all were proved right."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bug", choices=[*BUGS], action="append", help="which bug (default: all)")
    parser.add_argument("--cases", type=int, default=20, help="cases of the check (default: 20)")
    options = parser.parse_args()
    bugs = options.bug or [*BUGS]
    told = proved = 0
    for bug in bugs:
        found, outcome = asyncio.run(repaired(bug, options.cases))
        told += found == bug
        proved += outcome["passed"]
    print(f"{told} of {len(bugs)} bugs told apart, {proved} kernels proved")
    return 0 if proved == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
