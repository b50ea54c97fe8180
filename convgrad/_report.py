"""The report of a verification: a verdict with its reasons, as text, as a picture, and for CI systems."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import floor
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "junit", "missing"]

_SHOWN = 5
_CIRCLED = 20
_TF32_BITS = 11


class Report:
    """What `verify` found out about a result; `data` is the whole report as the service sent it.

    `maps` of `data` have the largest error of each tap, channel or pixel as a share of what is allowed: above 1 it
    fails. `rules` have what each rule measured, and its limit.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)

    def __repr__(self) -> str:
        return f"<Report of {self.data.get('op')}: {'passed' if self.passed else 'failed'}>"

    @property
    def passed(self) -> bool:
        """Whether all rules hold: the errors are those of an honest sum."""
        return self.data.get("passed") is True

    @property
    def equal(self) -> bool:
        """Whether the result has the very bits of the reference, rounded once."""
        return self.data.get("equal") is True

    def text(self) -> str:
        """Return the report in some lines."""
        data = self.data
        shape = list(data["shape"])
        lines = [
            f"{data['output']} of {data['op']}, {data['dtype']} {shape}: {'passed' if self.passed else 'FAILED'}",
            f"  {data['unequal']} of {_compared(data)} elements differ from the rounded float64 reference"
            + (f", {data['not_finite']} of them because one is Inf or NaN" if data["not_finite"] else ""),
            (
                f"  error: max {_short(data['max_error'])}, mean {_short(data['mean_error'])}, "
                f"RMS {_short(data['rms_error'])}, max relative {_short(data['max_relative_error'])}"
            ),
            "  in ULP: " + ", ".join(f"{_range(row)}: {row['count']}" for row in data["ulp"]),
        ]
        lines += _projections(data)
        lines += [f"  {_rule(rule)}" for rule in data["rules"] if rule["elements"] or not rule["passed"]]
        lines += [f"  cause: {cause['text']}" for cause in data["causes"]]
        if data["where"]:
            lines.append(f"  where: {data['where']['text']}")
        if _narrow(data):
            lines.append(f"  the errors are those of products of numbers with {data['product_bits']:.1f} bits")
        if data.get("arithmetic"):
            lines.append(f"  {data['arithmetic']['text']}")
        if data["difficulty"] > 1:
            how = f" {data['order']}" if data.get("order") else ""
            times = _short(data["difficulty"])
            lines.append(f"  honest sums of these data{how} err {times} times as much as in a random order")
        lines.append(f"  {_detection(data)}")
        onednn = data["verdicts"]["onednn"]
        word = "passed" if onednn["passed"] else f"failed by {onednn['failed']} elements"
        lines.append(f"  onednn ({onednn['test']}): {word}; {onednn['rule']}")
        lines += self._worst_lines()
        lines += [f"  hint: {hint}" for hint in data["hints"]]
        return "\n".join(lines)

    def finding(self) -> str:
        """Return what to act on, in a few lines: the broken rules with both numbers, the cause, the place, an element.

        Of a result that passes: that, and the errors that would have been found.
        """
        lines = self.text().splitlines()
        if self.passed:
            return "\n".join([lines[0], f"  {_detection(self.data)}"])
        kept = ("FAILED", "cause:", "where:", "hint:")
        return "\n".join(
            [lines[0], *(line for line in lines[1:] if line.strip().startswith(kept)), *self._worst_lines()]
        )

    def _worst_lines(self) -> list[str]:
        worst = self.data["worst"]
        if worst is None:
            return []
        lines = [
            (
                f"  worst element {worst['index']}: got {_short(worst['got'])}, expected {_short(worst['expected'])} "
                f"(exactly {worst['exact']!r}), {_distance(worst)}{_allowed(worst['share'])}"
            ),
            f"  it sums {_count(worst['terms'], 'product')}{', the largest:' if worst['largest'] else ''}",
        ]
        factors = self.data["factors"]
        for term in worst["largest"][:_SHOWN]:
            places = " * ".join(f"{name}{place}" for name, place in zip(factors, term["at"], strict=False))
            lines.append(f"    {places} = {_short(term['value'])}")
        return lines

    def junit(self, name: str | None = None) -> str:
        """Return the report as one test case in JUnit's XML, which CI systems read."""
        return junit({name or f"{self.data['op']}.{self.data['output']}": self})

    def figure(self) -> Figure:
        """Draw the maps of the errors and their histogram in ULP; needs matplotlib (the extra `plot`)."""
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        maps = {name: _plane(entry) for name, entry in self.data["maps"].items() if np.prod(entry["shape"]) > 1}
        figure = Figure(figsize=(4.6 * (len(maps) + 1), 4.4), layout="constrained")
        axes = figure.subplots(1, len(maps) + 1, squeeze=False)[0]
        figure.suptitle(self.text().splitlines()[0])
        for place, (name, values) in zip(axes, maps.items(), strict=False):
            shown = np.clip(values, 1e-3, 1e3)
            # red fails: the middle of the scale is 1
            image = place.imshow(shown, cmap="RdBu_r", norm=LogNorm(1e-3, 1e3), aspect="auto", interpolation="nearest")
            failed = np.argwhere(values > 1)
            for y, x in failed if len(failed) <= _CIRCLED else ():
                place.plot(x, y, "ko", markersize=14, fillstyle="none")
            place.set_title(f"largest error by {name}")
            place.set_ylabel(_AXES.get(name, ("", ""))[0])
            place.set_xlabel(_AXES.get(name, ("", ""))[1])
            place.xaxis.get_major_locator().set_params(integer=True)
            place.yaxis.get_major_locator().set_params(integer=True)
            figure.colorbar(image, ax=place, label="share of what is allowed")
        rows: Sequence[Mapping[str, Any]] = self.data["ulp"]
        axes[-1].bar([_range(row) for row in rows], [row["count"] for row in rows])
        axes[-1].set_yscale("log")
        axes[-1].set_title("elements by error in ULP")
        axes[-1].tick_params(axis="x", rotation=60)
        return figure

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Write `figure` as a PNG."""
        self.figure().savefig(path, dpi=120)


def junit(reports: Mapping[str, Report]) -> str:
    """Return reports by name as test cases in JUnit's XML."""
    failed = sum(not report.passed for report in reports.values())
    suite = ET.Element("testsuite", name="convgrad verify", tests=str(len(reports)), failures=str(failed), errors="0")
    for name, report in reports.items():
        case = ET.SubElement(suite, "testcase", classname="convgrad.verify", name=name)
        case.set("time", f"{report.data['stats'].get('compute_ms', 0) / 1000:.3f}")
        if report.passed:
            ET.SubElement(case, "system-out").text = report.text()
        else:
            broken = [_rule(rule) for rule in report.data["rules"] if not rule["passed"]]
            failure = ET.SubElement(case, "failure", message=[*broken, *_projections(report.data)][0].strip())
            failure.text = report.text()
    text: str = ET.tostring(suite, encoding="unicode", xml_declaration=True)
    return text


_AXES = {"channels": ("channel of dst", "channel of src"), "tap": ("tap", "tap"), "pixel": ("pixel", "pixel")}


def _plane(entry: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.array(entry["values"], np.float64)  # "inf" and "nan" are numbers to NumPy, too
    values = np.where(np.isnan(values), np.inf, values)
    return values.reshape(-1, values.shape[-1] if values.ndim > 1 else values.size)


def _compared(data: Mapping[str, Any]) -> int:
    """Return how many elements were compared one by one."""
    return int((data.get("projections") or {}).get("checked", data)["elements"])


def _rule(rule: Mapping[str, Any]) -> str:
    """Return what a rule found, with its two numbers."""
    word, name = "passed" if rule["passed"] else "FAILED", rule["rule"].replace("_", " ")
    measured, elements = rule["measured"], rule["elements"]
    if name == "exact":
        found = f"{int(measured)} of {elements} elements whose sums are exact have wrong bits"
    elif name == "mean square":
        found = f"the mean squared error is {_short(measured)} times the expected one; allowed: {_short(rule['limit'])}"
    elif name == "largest":
        found = f"the largest error is {_times(measured)}"
    else:
        found = "no known loss of precision shows" if rule["passed"] else "the errors are those of a known fault"
    return f"{word}, {name}: {found}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _distance(worst: Mapping[str, Any]) -> str:
    """Return how many numbers of the dtype lie between the two values; nothing for Inf and NaN."""
    finite = not isinstance(worst["got"], str) and not isinstance(worst["expected"], str)
    return f"{worst['ulp']} ULP off, " if finite else ""


def _allowed(share: float | str) -> str:
    return "where every bit counts" if share == "inf" else _times(share)


def _times(share: float | str) -> str:
    return "infinite" if share == "inf" else f"{_short(share)} times what is allowed"


def _detection(data: Mapping[str, Any]) -> str:
    """Return how much the verdict could see."""
    seen = data["detection"]
    if seen["one_element"] == 0:
        return "detection limit: none, one wrong bit would have been found"
    every, one = (missing(share, seen["products"]) for share in (seen["every_element"], seen["one_element"]))
    places = f"{every}, in every element or in one" if every == one else f"{every} in every element, or {one} in one"
    bits = seen["product_bits"]
    if data["dtype"] != "f32" or bits is None or bits >= _TF32_BITS:
        return f"detection limit: {places}"
    hidden = f"products of {floor(bits) + 1} bits or more can hide in these sums (TF32 has {_TF32_BITS})"
    return f"detection limit: {places}; {hidden}: verify normal numbers too"


def missing(share: float, products: int) -> str:
    """Return a detection limit, a share of the products of a sum, in words."""
    if share * products < 1:
        return f"one missing product of {products}"
    return f"{100 * share:.2g} % of the products missing"


def _projections(data: Mapping[str, Any]) -> list[str]:
    """Return the results of the projections, or nothing if the verification was not a fast one."""
    found = data.get("projections")
    if not found:
        return []
    word, mean, largest = "passed" if found["passed"] else "FAILED", found["mean_square"], found["largest"]
    if found["exact"] is None:
        measured = (
            f"mean square {_short(mean['measured'])}, at most {_short(mean['limit'])}; "
            f"largest {_short(largest['measured'])}, at most 1"
        )
    else:
        measured = "all exact" if found["exact"] else "sums that are exact have wrong bits"
    checked = found["checked"]
    return [
        f"  {word}, {found['count']} random projections of the whole result: {measured}",
        f"  in full: {checked['elements']} elements from {checked['first']} on, which all that follows is about",
    ]


def _narrow(data: Mapping[str, Any]) -> bool:
    """Whether most elements are wrong, as if their products had fewer bits."""
    bits, where = data["product_bits"], data["where"]
    return bits is not None and bits > 0 and where is not None and 2 * where["wrong"] > where["elements"]


def _range(row: Mapping[str, Any]) -> str:
    if row["to"] is None:
        return f"{row['from']} or more"
    return str(row["from"]) if row["from"] == row["to"] else f"{row['from']}-{row['to']}"


def _short(value: float | str) -> str:
    return f"{float(value):.4g}"
