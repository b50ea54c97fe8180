"""What the wheel holds besides the client: the packages that compute and serve, in `convgrad/_service/`.

`app`, `engine`, `kernels`, `schemas` and `verify` are common names: at the top level of a wheel they would collide with
other people's packages. So the wheel has them as `convgrad._service.app` and so on, and imports them by these names.
All imports of the sources begin a line; `tests/test_packaging.py` checks that none is left out.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SERVICE = ("app", "engine", "kernels", "schemas", "verify")
_NAMES = "|".join(_SERVICE)
_RENAMED = (
    (re.compile(rf"^(\s*)from ({_NAMES})\b(?=[ .])", re.MULTILINE), r"\1from convgrad._service.\2"),
    (re.compile(rf"^(\s*)import ({_NAMES})\.", re.MULTILINE), r"\1import convgrad._service.\2."),
    (re.compile(rf"^(\s*)import ({_NAMES})\b(?!\.)", re.MULTILINE), r"\1from convgrad._service import \2"),
)


def renamed(text: str) -> str:
    """Return a source with the packages of the service imported from `convgrad._service`."""
    for pattern, replacement in _RENAMED:
        text = pattern.sub(replacement, text)
    return text


class ServiceHook(BuildHookInterface[Any]):
    """Add the service to a wheel; an editable install runs it from the checkout, not from a copy."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the renamed sources, and say where each of them goes."""
        if version != "standard":
            return
        self._folder = tempfile.mkdtemp()
        root = Path(self.root)
        sources = [*(path for name in _SERVICE for path in root.glob(f"{name}/**/*")), *root.glob("convgrad/*.py")]
        for path in sorted(path for path in sources if path.is_file() and "__pycache__" not in path.parts):
            own = path.relative_to(root)
            place = own if own.parts[0] == "convgrad" else Path("convgrad/_service") / own
            if path.suffix != ".py":
                build_data["force_include"][str(path)] = str(place)
            elif (text := renamed(before := path.read_text(encoding="utf-8"))) != before or place != own:
                copy = Path(self._folder) / own
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text, encoding="utf-8")
                build_data["force_include"][str(copy)] = str(place)
        package = Path(self._folder) / "__init__.py"
        package.write_text('"""The packages that compute and serve."""\n', encoding="utf-8")
        build_data["force_include"][str(package)] = "convgrad/_service/__init__.py"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the copies."""
        if version == "standard":
            shutil.rmtree(self._folder)
