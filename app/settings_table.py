"""Write the table of settings into `docs/running.md`, or check that it is up to date.

python -m app.settings_table            write
python -m app.settings_table --check    exit 1 if the table is stale
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import ByteSize

from app.settings import PREFIX, Settings

__all__ = ["main", "with_settings"]

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "running.md"
_BEGIN = "<!-- Made from app/settings.py by scripts/docs. Change the descriptions, not this table. -->\n"
_END = "<!-- End of the table. -->\n"
_WORD = re.compile(r"(?<!\S)[\w/*](?:\S*[\w*])?")
# Names, paths and addresses that a description, which is plain text, writes as they are typed.
_LITERAL = re.compile(r"\*|/\w+|https?://\S+|\d+(?:\.\d+){3}(?::\d+)?")


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m app.settings_table", description="Generate the table of settings.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the table is out of date")
    parser.add_argument("--page", type=Path, default=_PAGE, help="page that has the table")
    chosen = parser.parse_args(arguments)
    old = chosen.page.read_text(encoding="utf-8")
    made = with_settings(old)
    if chosen.check:
        if made != old:
            sys.stderr.write(f"out of date: {chosen.page} (run scripts/docs)\n")
        return int(made != old)
    chosen.page.write_text(made, encoding="utf-8")
    return 0


def _rows() -> Iterator[str]:
    yield "| variable | default | meaning |"
    yield "|---|---|---|"
    for name, field in Settings.model_fields.items():
        default = _as_written(field.default)
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        meaning = _WORD.sub(partial(_marked, choices), str(field.description))
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


def _marked(choices: Sequence[str], word: re.Match[str]) -> str:
    """Return a word of a description in Markdown."""
    if word[0] in Settings.model_fields and "_" in word[0]:
        return f"`{PREFIX}{word[0].upper()}`"
    return f"`{word[0]}`" if word[0] in choices or _LITERAL.fullmatch(word[0]) else word[0]


if __name__ == "__main__":
    raise SystemExit(main())
