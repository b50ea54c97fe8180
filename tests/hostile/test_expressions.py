"""Regular expressions that meet bytes from outside take time in proportion to their input, whatever it is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import time
from collections import deque
from functools import cache
from types import ModuleType
from typing import Any

import pytest

import app
import convgrad
import engine
import schemas

SIZE = 1 << 16
"""At least the bound of each input. A quadratic expression takes half a minute for it, a linear one a millisecond."""

WORST: dict[str, list[str]] = {
    # what the expression meets, in its worst order: what it takes for the beginning, again and again, and no end
    "app.api.oip.regions._KEY": ["a" * SIZE + "/"],
    "app.api.oip.regions._NAME": ["a" * SIZE + " "],
    "app.api.oip.request._INTEGER": ["1" * SIZE, "-" + "1" * SIZE + "x"],
    "app.api.oip.request._LIST": [
        "[" + " " * SIZE, "[" + "1, " * SIZE, "1 ," * SIZE, "[" + "1" * SIZE, "[1" + " " * SIZE + "x",
        "[" + "-12345678901234567 , " * (SIZE // 16) + "x",
    ],
    "app.calls.jobs.tasks._IDEMPOTENCY_KEY": ["a" * SIZE, "a" * 255 + " "],
    "app.http.cross_origin._HOST": ["a" * SIZE + ":x", "[" + ":" * SIZE, "a:" + "1" * SIZE + "x"],
    "app.replies.formats._QUALITY": ["0." + "1" * SIZE],
    "app.replies.formats._NAME": ["a" * SIZE, "a/" + "a" * SIZE + " "],
    "app.telemetry.context.REQUEST_ID": ["a" * SIZE],
    "app.telemetry.logs._CONTROL": ["a" * SIZE],
    "app.telemetry.logs._CONTROL_IN_JSON": ["a" * SIZE],
    "app.telemetry.logs._CONTROL_IN_TRACEBACK": ["a" * SIZE],
    "convgrad._npy._PRINTABLE_DESCR": ["<f" + "1" * SIZE],
    "convgrad._npy._TOKEN": [" " * SIZE, "'" + "a" * SIZE, "9" * SIZE],
    "convgrad._arithmetic._WINOGRAD": ["winograd F(" + "1" * SIZE, "winograd F(1," + " " * SIZE],
    "engine.sealed.checks._DIGEST": ["sha256:" + "a" * SIZE],
    "engine.sealed.checks._ID": ["a" * SIZE],
    "app.settings._ORIGIN": ["a" * SIZE, "a://" + " " * SIZE],
    "engine.sealed.checks._LABEL": ["a" * SIZE + "\n"],
    "convgrad._core._OP": ["a" * SIZE + "/"],
    "convgrad._jobs._ID": ["a" * SIZE],
    "convgrad._sealed._ID": ["a" * SIZE],
    "convgrad._graphs._HEAD": ['name="' * SIZE],
}  # fmt: skip

OURS = {
    "app.api.web._COMMENT",
    "app.http.keys._DIGEST", "app.http.keys._LIMIT", "app.http.keys._NAME", "app.settings._HOST_NAME",
    "convgrad._check.benchdnn._PART", "convgrad._command.spec._DESCRIBED", "convgrad._command.spec._INTEGERS",
    "convgrad._multipart._NAME",
    "engine.threads._OPENMP", "schemas.describe._NAME",
}  # fmt: skip
"""Expressions that meet only what the operator or the user of the command wrote, or our own texts."""


@cache
def expressions() -> dict[str, re.Pattern[Any]]:
    """Return the compiled expressions of all modules by name."""
    found = {}
    for package in (app, engine, schemas, convgrad):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("__main__") or module.name.startswith(("convgrad.torch", "convgrad.jax")):
                continue
            loaded: ModuleType = importlib.import_module(module.name)
            for name, value in vars(loaded).items():
                if isinstance(value, re.Pattern):
                    found[f"{module.name}.{name}"] = value
    return found


def used(name: str) -> set[str]:
    """Return the methods of an expression that its module calls; both kinds of match if others use it."""
    module, _, variable = name.rpartition(".")
    source = inspect.getsource(importlib.import_module(module))
    return set(re.findall(rf"\b{variable}\.(\w+)\(", source)) or {"match", "fullmatch"}


def apply(expression: re.Pattern[Any], method: str, text: Any) -> None:
    """Call a method of an expression, to its end."""
    if method == "sub":
        expression.sub(text[:0], text)
    elif method == "finditer":
        deque(expression.finditer(text), 0)
    else:
        getattr(expression, method)(text)


def test_every_expression_has_a_row() -> None:
    """A new expression needs its worst inputs here, or a word that it meets nothing from outside."""
    imported = {name for name in expressions() if name.endswith(".REQUEST_ID")} - WORST.keys()
    assert expressions().keys() - imported == WORST.keys() | OURS


@pytest.mark.parametrize("name", WORST)
def test_the_worst_inputs_take_no_time(name: str) -> None:
    """Each use that the module makes of the expression ends within a second of processor time."""
    expression = expressions()[name]
    for text in WORST[name]:
        worst: Any = text.encode("latin-1") if isinstance(expression.pattern, bytes) else text
        started = time.process_time()
        for method in used(name):
            apply(expression, method, worst)
        assert time.process_time() - started < 1.0, f"{text[:20]!r}..."
