"""Where the service is, and how a process of its own runs it.

Its packages are called `app`, `kernels`, `schemas` and `verify`, and only that process has them on its path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

__all__ = ["NotInstalled", "command", "environment", "install_hint", "service_root"]

_NEEDS = ("fastapi", "numba", "pydantic_settings", "uvicorn")
_FILES = ("app/__main__.py", "schemas/__init__.py")


class NotInstalled(RuntimeError):  # noqa: N818 - named as the errors of the tree
    """The service, or a package that it needs, is not installed."""


def service_root() -> Path:
    """Return the folder of the service's packages.

    It is part of this package in a wheel, beside it in a checkout, and in an image the working folder or on the path.
    Raises `NotInstalled`.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_service", package.parent, Path.cwd(), *map(Path, sys.path)):
        if all((folder / file).is_file() for file in _FILES):
            if missing := [name for name in _NEEDS if find_spec(name) is None]:
                raise NotInstalled(f"the service needs {', '.join(missing)}: {install_hint('server')}")
            return folder.resolve()
    raise NotInstalled(f"the service is not installed here: {install_hint('server')}, or run its image")


def command(arguments: Sequence[str], module: str = "app") -> list[str]:
    """Return the command that runs the service with these flags."""
    # -P: don't import another package named `app` from the working folder.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(root: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `command`: `base`, with the service's packages on the path."""
    path = os.pathsep.join([str(root), *filter(None, [base.get("PYTHONPATH")])])
    return {**base, "PYTHONPATH": path}


def install_hint(extra: str) -> str:
    """Return the command that installs an extra: from the clone, because no package index has this package."""
    clone = Path(__file__).resolve().parent.parent
    if (clone / "pyproject.toml").is_file():
        return f"pip install '{clone}[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of its repository"
