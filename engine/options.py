"""The `options` of a call: outputs, encoding of the reply, kernel, deadline, and how a result is verified."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

from kernels.problem import Algorithm
from schemas.broken_rules import broken_rule, invalid_params, number
from schemas.tensors import MAX_LISTED, MAX_OUTPUTS, listed

__all__ = ["ENCODINGS", "Encoding", "Options", "check_encoding", "parse_options", "refuse_options"]

Encoding = Literal["base64", "npy", "list"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

_LONGEST_MS = 86_400_000


class Options(NamedTuple):
    """The options of one call, with defaults applied; without `outputs` the operation's first is computed."""

    encoding: Encoding = "base64"
    deadline_ms: int | None = None
    reference: bool = False
    reproducible: bool = False
    algorithm: Algorithm = "direct"
    outputs: tuple[str, ...] = ()
    explain: bool = False
    fast: bool | None = None
    arithmetic: tuple[tuple[str, Any], ...] | None = None
    """What the kernel of a verified result declares, as `engine.arithmetic` reads it."""

    @property
    def uses_reference(self) -> bool:
        """Whether the reference kernel computes: it has the same bits on every processor."""
        return self.reference or self.reproducible


_NAMES = Options._fields
_CHOICES: dict[str, tuple[str, ...]] = {"encoding": ENCODINGS, "algorithm": get_args(Algorithm)}


def parse_options(options: object) -> Options:
    """Check `options` as a caller wrote them; null means the default.

    Raises `InvalidParams` with every broken rule, an unknown option among them.
    """
    if options is None or options == {}:
        return Options()
    if not isinstance(options, Mapping):
        raise invalid_params("options", [broken_rule(["options"], "options must be an object", "type")])
    unknown = f"there is no such option; the options are {', '.join(_NAMES)}"
    names = [name for name in options if name not in _NAMES]
    broken = [broken_rule(["options", name[:64]], unknown, "unknown_option") for name in names]
    values = {name: options[name] for name in _NAMES if options.get(name) is not None}
    rules = {name: _broken(name, value) for name, value in values.items()}
    broken += [broken_rule(["options", name], rule, "value") for name, rule in rules.items() if rule is not None]
    direct = next((name for name in ("reference", "reproducible") if values.get(name) is True), None)
    if direct and values.get("algorithm") == "winograd":
        rule = f"algorithm must be direct or auto with {direct}, which sums directly in float64, but is winograd"
        broken.append(broken_rule(["options", "algorithm"], rule, "conflict"))
    if broken:
        raise invalid_params("options", broken)
    if "outputs" in values:
        values["outputs"] = tuple(values["outputs"])
    if "arithmetic" in values:
        values["arithmetic"] = tuple(sorted(values["arithmetic"].items()))
    return Options(**values)


def refuse_options(options: Options, names: Iterable[str], task: str) -> None:
    """Raise `InvalidParams` for options that a task would ignore."""
    unused = [name for name in names if getattr(options, name)]
    if unused:
        rules = [broken_rule(["options", name], f"{name} has no effect on {task}", "unused_option") for name in unused]
        raise invalid_params("options", rules)


def check_encoding(options: Options, outputs: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Raise `InvalidParams` if an output, of these names and shapes, has too many elements for a list of numbers."""
    for name, shape in outputs if options.encoding == "list" else ():
        if (count := listed(shape)) > MAX_LISTED:
            rule = f"encoding list is for at most {MAX_LISTED} numbers, but {name} has {count}"
            broken = [broken_rule(["options", "encoding"], f"{rule}: use base64 or npy", "too_long")]
            raise invalid_params("options", broken)


def _broken(name: str, value: Any) -> str | None:
    if name == "deadline_ms":
        kept, rule = type(value) is int and 1 <= value <= _LONGEST_MS, f"an integer from 1 to {_LONGEST_MS}"
        rule += f", but is {number(value)}" if type(value) is int else ""
    elif name == "outputs":
        names = isinstance(value, list) and all(isinstance(output, str) for output in value)
        kept = names and 1 <= len(value) <= MAX_OUTPUTS
        rule = f"a list of 1 to {MAX_OUTPUTS} names of outputs"
    elif name == "arithmetic":
        plain = isinstance(value, Mapping) and {*map(type, value)} <= {str}
        kept, rule = plain and {*map(type, value.values())} <= {str, int, NoneType}, "an object of names and integers"
    elif name in _CHOICES:
        *others, last = _CHOICES[name]
        kept, rule = value in _CHOICES[name], f"{', '.join(others)} or {last}"
    else:
        kept, rule = isinstance(value, bool), "true or false"
    return None if kept else f"{name} must be {rule}"
