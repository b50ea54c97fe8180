"""Write the table of settings into `docs/running.md`, or with `--check` exit with 1 if it is out of date."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import ByteSize

from app.settings import PREFIX, Settings

__all__ = ["main", "with_settings"]

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "running.md"
_BEGIN = "<!-- Made from app/settings.py by scripts/docs. Change the descriptions, not this table. -->\n"
_END = "<!-- End of the table. -->\n"


def with_settings(page: str) -> str:
    """Return a page with its table of settings made anew.

    Raises `ValueError` unless the page has the two comments that enclose the table, once each.
    """
    try:
        before, rest = page.split(_BEGIN)
        _, after = rest.split(_END)
    except ValueError:
        raise ValueError(f"the page must have {_BEGIN.strip()} and {_END.strip()}, once each") from None
    table = "\n".join(_rows())
    return f"{before}{_BEGIN}\n{table}\n\n{_END}{after}"


def main(check: bool, page: Path = _PAGE) -> int:
    """Write or check the table; return the exit code."""
    old = page.read_text(encoding="utf-8")
    made = with_settings(old)
    if not check:
        page.write_text(made, encoding="utf-8")
    elif made != old:
        sys.stderr.write(f"out of date: {page} (run scripts/docs)\n")
    return int(check and made != old)


def _rows() -> Iterator[str]:
    yield "| variable | default | meaning |"
    yield "|---|---|---|"
    for name, field in Settings.model_fields.items():
        default = _as_written(field.default)
        meaning = " ".join(str(field.description).split())
        yield f"| `{PREFIX}{name.upper()}` | {f'`{default}`' if default else ''} | {meaning} |"


def _as_written(value: object) -> str:
    """Return a default as it is written in a variable; empty if that is absence."""
    match value:
        case None | ():
            return ""
        case bool():
            return str(value).lower()
        case ByteSize() if value:
            return value.human_readable().replace(".0", "")
        case int() if value >= 10**6:
            return f"{value:.0e}".replace("e+", "e")
        case float():
            return f"{value:g}"
    return str(value)


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
