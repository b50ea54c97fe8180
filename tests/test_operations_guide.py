"""The operator's guide lists every reason and metric, `docs/http.md` every error, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cluster.engine import RayEngine
from app.main import create_app
from app.replies.errors import MAPPING
from app.settings import Settings
from convgrad import _errors as errors

ROOT = Path(__file__).resolve().parent.parent


def rows(title: str, page: str = "operations-guide.md") -> dict[str, list[str]]:
    """Return the table under the heading that starts with `title`: the other cells by the first, without markup."""
    section = re.split(r"^## ", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(title)]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    names = [row[0].strip(" `") for row in cells]
    assert len(set(names)) == len(names)
    return {name: row[1:] for name, row in zip(names, cells, strict=True)}


def test_every_error_has_its_row() -> None:
    """Code, status and JSON-RPC code are right for each error that the service can send."""
    sent = {cls for cls in MAPPING if not issubclass(cls, errors.TransportError)} - {errors.ConvgradError}
    expected = {cls.code: [str(MAPPING[cls].status), str(MAPPING[cls].rpc_code)] for cls in sent}
    assert {code: cells[:2] for code, cells in rows("Errors", "http.md").items()} == expected


def test_every_metric_has_its_row() -> None:
    """The table of metrics names each metric of a service, with the engine that has the most."""
    service = create_app(Settings(workers=1)).state.service
    service.engine = RayEngine(service.segments, workers=1, address="", expected=1, costs=None)
    found = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in service.telemetry.registry.collect()
        if family.name.startswith("convgrad_")
    }
    named = {name.removesuffix("_info"): cells for name, cells in rows("Metrics").items()}
    assert set(named) == {name.removesuffix("_info") for name in found}


def test_labels_match_the_code() -> None:
    """The labels of the counters and histograms match the code."""
    tree = ast.parse((ROOT / "app" / "telemetry" / "metrics.py").read_text("utf-8"))
    declared = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"self._counter", "self._histogram"}:
            words = [text.value for text in ast.walk(node) if isinstance(text, ast.Constant)]
            name, labels = str(words[0]), {str(word) for word in words[1:] if re.fullmatch(r"[a-z]+", str(word))}
            total = "_total" if node.func.attr == "_counter" else ""  # type: ignore[attr-defined]
            declared[f"convgrad_{name}{total}"] = labels
    assert declared
    table = rows("Metrics")
    assert {name: set(re.findall(r"\w+", table[name][0])) for name in declared} == declared


def reasons() -> Iterator[str]:
    """Yield every reason for a refusal in the service's source."""
    for path in (*(ROOT / "app").rglob("*.py"), *(ROOT / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            values: list[ast.expr] = []
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                values = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "reason"]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"_limit", "context.refusals.append"}:
                values = node.args[:1]
            for value in values:
                for choice in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                    if isinstance(choice, ast.Constant):
                        yield str(choice.value)


def test_every_reason_has_its_row() -> None:
    """The table of refusals names each reason in the source, and the codes of errors that have no reason."""
    assert set(rows("Why")) == {*reasons(), errors.ShuttingDown.code, errors.TooLarge.code}


@pytest.mark.parametrize(("title", "page"), [("Why", "operations-guide.md"), ("Errors", "http.md")])
def test_every_row_is_explained(title: str, page: str) -> None:
    """The last cell of every row, what it means or what to do, is not empty."""
    assert all(cells[-1] for cells in rows(title, page).values())
