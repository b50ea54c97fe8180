"""The flags of `convgrad serve`: one for each setting, described in words."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import CliImplicitFlag, CliSettingsSource, SettingsConfigDict

from app.settings import RENAMED, Settings, as_flag, as_written
from convgrad._command.parser import Parser

__all__ = ["parse_flags"]

_EXITS = "exit status: 0 stopped by a signal, 2 invalid setting or file, 3 the address is taken, 4 no worker can start"
# What a value is called, by the type of its setting; those that end in `_s` are seconds.
_WORDS: Mapping[type, str] = {int: "NUMBER", ByteSize: "SIZE", str: "TEXT", SecretStr: "TEXT", bool: "true|false"}
_NAMED = {"host": "ADDRESS", "ops_host": "ADDRESS", "port": "PORT", "ops_port": "PORT"}
_RENAMED = {as_flag(old): as_flag(new) for old, new in RENAMED.items()} | {"--check": "--dry-run"}


class _Flags(Settings):
    """Serve convolution gradients over HTTP. Every flag is also an environment variable, CONVGRAD_<NAME>.

    Sizes take units, such as 512MiB; a LIST is separated by commas.
    """

    # An empty variable is unset, but an empty flag is a value: `--host ""` means every address.
    model_config = SettingsConfigDict(cli_kebab_case=True, env_ignore_empty=False)

    dry_run: CliImplicitFlag[bool] = Field(
        default=False,
        description="Check the settings and the files they name, print what the service would do, exit with 0 or 2.",
    )


def parse_flags(arguments: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Return the settings that are given as flags, as they are written, and whether it is a dry run.

    Raises `UsageError`.
    """
    parser = Parser(
        prog="convgrad serve",
        description=inspect.getdoc(_Flags),
        epilog=_EXITS,
        renamed=_RENAMED,
    )
    source = CliSettingsSource[Any](_Flags, root_parser=parser, add_argument_method=_add_in_words)
    values = source(args=list(arguments))()
    return values, bool(values.pop("dry_run", False))


def _add_in_words(parser: Any, *names: str, **settings: Any) -> Any:
    """Add a flag as argparse does, with words for Pydantic's type and default."""
    field = _Flags.model_fields.get(settings.get("dest", ""))
    if field is not None:
        settings["help"] = _help(field).replace("%", "%%")
        if "metavar" in settings:
            settings["metavar"] = _word(settings["dest"], field.annotation)
    return parser.add_argument(*names, **settings)


def _word(name: str, annotation: Any) -> str:
    """Return what the value of a setting is called."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not types.NoneType)
    if name in _NAMED:
        return _NAMED[name]
    if name.endswith("_s"):
        return "SECONDS"
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return "LIST"
    return _WORDS.get(annotation, "FILE")


def _help(field: FieldInfo) -> str:
    """Return the description of a setting with its default, unless that is absence."""
    default = "" if isinstance(field.default, bool) else as_written(field.default)
    return f"{field.description} (default: {default})" if default else str(field.description)
