"""A tolerance to take along: the reference with the largest honest error of each element, as text and as files."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convgrad._dtypes import DTYPES
from convgrad._errors import ProtocolError
from convgrad._events import Array
from convgrad._report import missing

__all__ = ["SUFFIXES", "Tolerance"]

SUFFIXES = (".npz", ".json", ".h")
"""The kinds of files that `Tolerance.save` writes."""

_PER_LINE = 8


class Tolerance:
    """How far honest results of one call may be from its float64 reference; `data` is the whole report.

    `reference` and `tolerance` have the shape of the output. They are float32, which holds f16 and bf16, or float64 for
    f64: the exact sums, rounded to the dtype once, and how far an honest element may be from that. Where the
    tolerance is 0, every bit counts; where it is infinite, any value may be honest, because the sum may overflow.
    """

    def __init__(self, data: Mapping[str, Any], reference: Array, tolerance: Array) -> None:
        self.data = dict(data)
        self.reference = reference
        self.tolerance = tolerance

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Tolerance:
        """Read a reply, whose tensors may be arrays already; raises `ProtocolError` for anything else."""
        try:
            outputs = reply["outputs"]
            reference, tolerance = (_array(outputs[name]) for name in ("reference", "tolerance"))
            return cls({name: value for name, value in reply.items() if name != "outputs"}, reference, tolerance)
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError("the reply must have the outputs `reference` and `tolerance`") from error

    def __repr__(self) -> str:
        return f"<Tolerance of {self.data.get('op')}: atol={self.atol!r}, rtol={self.rtol!r}>"

    @property
    def atol(self) -> float:
        """The absolute part of the smallest pair that contains the tolerance of every element."""
        return float(self.data["atol"])

    @property
    def rtol(self) -> float:
        """The relative part of that pair, for `numpy.testing.assert_allclose(actual, reference, rtol, atol)`."""
        return float(self.data["rtol"])

    def contains(self, result: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each element of a result, of the shape of `reference`, whether it may be honest."""
        with np.errstate(invalid="ignore", over="ignore"):
            wide = np.asarray(result).astype(np.float64)
            right = (wide == self.reference) | (np.isnan(wide) & np.isnan(self.reference))
            near = np.abs(wide - self.reference.astype(np.float64)) <= self.tolerance
            found: np.ndarray[Any, np.dtype[np.bool_]] = right | near | np.isinf(self.tolerance)
        return found

    def text(self) -> str:
        """Describe the tolerance in a few lines: atol and rtol, where they come from, and which errors they miss."""
        data, seen = self.data, self.data["detection"]
        lines = [f"{data['output']} of {data['op']}, {data['dtype']} {list(data['shape'])}", f"  {data['text']}"]
        if data["exact"]:
            lines.append(f"  {data['exact']} of {data['elements']} elements must have every bit of the reference")
        if data["not_finite"]["first"]:
            nan, inf, first = (data["not_finite"][name] for name in ("nan", "inf", "first"))
            lines.append(f"  expected: {nan} NaN and {inf} Inf, the first at {first[0]}")
        if data["unbounded"]:
            lines.append(f"  {data['unbounded']} elements may have any value: the sum may be too large on the way")
        shares = {"each element": seen["one_element"], "the pair": seen["one_element_of_pair"]}
        lines += [
            f"  not seen in one element by the tolerance of {name}: "
            + (missing(share, seen["products"]) if share else "nothing, every bit counts")
            for name, share in shares.items()
        ]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `.npz` archive, a JSON file, or a C header `.h` whose names begin with that of the file.

        Raises `ValueError` for another suffix.
        """
        place = Path(path)
        if place.suffix == ".npz":
            limits = {name: np.float64(self.data[name]) for name in ("atol", "rtol")}
            limits["detection_limit"] = np.float64(self.data["detection"]["one_element"])
            np.savez(place, reference=self.reference, tolerance=self.tolerance, problem=json.dumps(self.data), **limits)  # type: ignore[arg-type] # no name is allow_pickle
        elif place.suffix == ".json":
            arrays = {"reference": _listed(self.reference), "tolerance": _listed(self.tolerance)}
            place.write_text(json.dumps(self.data | arrays), encoding="utf-8")
        elif place.suffix == ".h":
            place.write_text(self._header(re.sub(r"\W", "_", place.stem, flags=re.ASCII)), encoding="utf-8")
        else:
            raise ValueError(f"a tolerance is written to a file that ends in {', '.join(SUFFIXES)}, not {place.name}")

    def _header(self, name: str) -> str:
        name = f"_{name}" if name[:1].isdigit() else name
        kind = "double" if self.reference.dtype == np.float64 else "float"
        about = "\n".join(f" *{line and ' ' + line}" for line in self.text().splitlines())
        arrays = "".join(
            f"static const {kind} {name}_{part}[] = {{\n{_initializer(values, kind)}\n}};\n"
            for part, values in (("reference", self.reference), ("tolerance", self.tolerance))
        )
        return _HEADER.format(
            name=name, about=about, arrays=arrays, atol=self.atol, rtol=self.rtol, count=self.reference.size,
            limit=float(self.data["detection"]["one_element"]),
        )  # fmt: skip


_HEADER = """/*
{about}
 *
 * EXPECT_NEAR(actual[i], {name}_reference[i], {name}_tolerance[i]), or, also for NaN and Inf,
 * EXPECT_TRUE({name}_holds(i, actual[i])).
 */
#pragma once
#include <math.h>
#include <stddef.h>

static const size_t {name}_count = {count};
static const double {name}_atol = {atol!r};
static const double {name}_rtol = {rtol!r};
static const double {name}_detection_limit = {limit!r};
{arrays}
static inline int {name}_holds(size_t i, double actual) {{
    const double reference = {name}_reference[i], tolerance = {name}_tolerance[i];
    if (reference != reference) return actual != actual;
    return actual == reference || fabs(actual - reference) <= tolerance || tolerance > 1.7976931348623157e308;
}}
"""


def _array(value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return value
    raw = bytearray(base64.b64decode(value["data"], validate=True))
    return np.frombuffer(raw, DTYPES[value["dtype"]].numpy).reshape(value["shape"])


def _listed(values: Array) -> list[float | str]:
    """Return the elements, in C order; NaN and Inf by name, as in reports."""
    return [value if np.isfinite(value) else str(value) for value in values.reshape(-1).tolist()]


def _initializer(values: Array, kind: str) -> str:
    names, end = {"inf": "INFINITY", "-inf": "-INFINITY", "nan": "NAN"}, "f" if kind == "float" else ""
    flat = values.reshape(-1)
    texts = [np.format_float_scientific(value) for value in flat]
    texts = [names.get(text) or text.replace(".e", ".0e") + end for text in texts] or ["0"]
    return ",\n".join("    " + ", ".join(texts[at : at + _PER_LINE]) for at in range(0, len(texts), _PER_LINE))
