"""Check settings against each other, their files and this machine, and describe what a service would do with them."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ByteSize, ValidationError
from pydantic_core import ErrorDetails

from app.http.authentication import make_key_ring
from app.settings import PREFIX, RENAMED, Settings, as_flag, unknown_variables
from convgrad._launch import install_hint
from engine.container import cpu_count, memory_bytes
from kernels.emit.cache import cache_folder
from kernels.prepare import read_verdict
from kernels.target import target

__all__ = ["BrokenSettings", "describe", "read_settings", "warnings"]

# What a value must be, by Pydantic's name of the error.
_RULES = {
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "byte_size": "must be a size, such as 512MiB",
    "byte_size_unit": "must be a size, such as 512MiB",
    "literal_error": "must be {expected}",
    "string_unicode": "must be text in UTF-8",
    "too_short": "must have at least {min_length} characters",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "value_error": "{error}",
}
_LONGEST_PATH = 107  # of a Unix socket
_PRIVILEGED = 1024


class BrokenSettings(ValueError):  # noqa: N818 - it is a list of them
    """Settings that the service can't start with; the message has a line for each."""


def read_settings(flags: Mapping[str, Any]) -> Settings:
    """Return the settings of flags and of variables, flags first.

    Raises `BrokenSettings`, which lists all that are malformed, contradict others, name a file or an address that can't
    be used, or ask for more than this machine has.
    """
    broken: dict[str, str] = {}
    while True:
        defaults = {name: Settings.model_fields[name].default for name in broken}
        try:
            settings = Settings(**{**flags, **defaults})
            break
        except ValidationError as error:
            for entry in error.errors(include_url=False, include_input=False):
                name = str(entry["loc"][0]) if entry["loc"] else "host"
                broken[name] = _rule(entry).removeprefix("host ")
    broken = dict(_refused(settings)) | broken
    lines = [f"{_as_given(name, flags)}: {broken[name]}" for name in Settings.model_fields if name in broken]
    renamed = {PREFIX + old.upper(): PREFIX + new.upper() for old, new in RENAMED.items()}
    lines += [
        f"{name} has been renamed: it is {renamed[name.upper()]} now" for name in os.environ if name.upper() in renamed
    ]
    if lines:
        raise BrokenSettings("\n".join(lines))
    return settings


def _rule(entry: ErrorDetails) -> str:
    """Return what a value must be, in our words."""
    facts = entry.get("ctx", {})
    if entry["type"] == "literal_error":
        facts = {"expected": facts["expected"].replace("'", "")}
    return _RULES[entry["type"]].format(**facts) if entry["type"] in _RULES else entry["msg"]


def _as_given(name: str, flags: Mapping[str, Any]) -> str:
    """Return a setting as it was given, by its flag or its variable, with the value unless that is a secret."""
    given = {variable.upper(): (f"{variable}=", value) for variable, value in os.environ.items() if value}
    label, value = given.get(PREFIX + name.upper(), (f"{as_flag(name)} ", None))
    if name in flags:
        label, value = f"{as_flag(name)} ", str(flags[name])
    if value is None or "Secret" in str(Settings.model_fields[name].annotation):
        return label[:-1]
    return label + (shlex.quote(value) if value.isprintable() else repr(value))


def _refused(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each setting that can't be, with the reason."""
    yield from _contradictions(settings)
    checks: dict[str, Callable[[Settings], object]] = {
        "host": _check_host,
        "uds": _check_path,
        "ops_host": _check_ops_host,
        "keys" if settings.keys_file is None else "keys_file": make_key_ring,
        "tls_certificate": lambda settings: _check_readable(settings.tls_certificate),
        "tls_key": lambda settings: _check_readable(settings.tls_key),
        "tls_client_ca": lambda settings: _check_readable(settings.tls_client_ca),
        "engine": lambda settings: _check_extra("ray", "ray", needed=settings.engine == "ray"),
    }
    refused = {name: reason for name, check in checks.items() if (reason := _reason(check, settings))}
    if not any(name.startswith("tls") for name in refused):
        refused["tls_certificate"] = _reason(_check_tls, settings)
    yield from ((name, reason) for name, reason in refused.items() if reason)


def _reason(check: Callable[[Settings], object], settings: Settings) -> str:
    """Return why a check fails; empty if it does not."""
    try:
        check(settings)
    except ssl.SSLError as error:
        files = "certificate, key and CAs (--tls-key, --tls-client-ca) must be PEM files that belong together"
        return f"{files}: {error.reason or error}"
    except OSError as error:
        return f"can't be used: {error.strerror}"
    except UnicodeError:
        return "is not a host name or an address"
    except ValueError as error:
        return str(error)
    return ""


def _contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield settings that are more than this machine has, or than another one allows; defaults never are."""
    machine, tensors = memory_bytes(), settings.memory_budget
    bounds = {
        "memory_limit": (machine, "the memory of this machine or container"),
        "ray_join": (machine, "the memory of this machine or container"),
        "body_limit": (machine, "the memory of this machine or container"),
        "output_limit": (tensors, "the memory for the tensors of all calls (--memory-limit)"),
        "sealed_memory": (tensors, "the memory for the tensors of all calls (--memory-limit)"),
        "head_limit": (int(settings.body_limit), "the whole body (--body-limit)"),
    }
    for name, (most, what) in bounds.items():
        if name in settings.model_fields_set and getattr(settings, name) > most:
            yield name, f"is more than {what}, {_human(most)}"
    if settings.sealed_case_s > settings.sealed_check_s:
        yield "sealed_case_s", f"is more than a whole check may take (--sealed-check-s), {settings.sealed_check_s:g}"
    if settings.ops_port and settings.uds is None and settings.ops_port == settings.port:
        yield "ops_port", "is the port of the service (--port)"


def warnings(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting that is valid and yet probably a mistake, and for each unknown variable."""
    yield from unknown_variables(os.environ)
    processors, files = cpu_count(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    given = settings.model_fields_set
    if settings.worker_count > processors:
        yield f"{settings.worker_count} workers share {processors} processors: each takes memory, and none is faster"
    if settings.memory_budget > 0.9 * memory_bytes():
        yield (
            f"tensors may take {_human(settings.memory_budget)} of {_human(memory_bytes())}: "
            "little is left for the processes themselves"
        )
    if "connections" in given and settings.connections > files:
        yield f"{settings.connections} connections need more than the {files} open files that are allowed (ulimit -n)"
    if settings.key_calls > settings.queue_length:
        yield f"a key may have {settings.key_calls} calls at a time, but all together only {settings.queue_length}"
    if settings.engine == "local" and (ignored := sorted(name for name in given if name.startswith("ray_"))):
        yield f"{', '.join(map(as_flag, ignored))}: of no effect without --engine ray"


def describe(settings: Settings) -> Iterator[str]:
    """Yield a line for each thing that the service would do."""
    rows = {
        "listens on": _address(settings),
        "ops port": _ops_port(settings),
        "keys": _keys(settings),
        "workers": f"{settings.worker_count}, on {cpu_count()} processors",
        "memory": f"{_human(settings.memory_budget)} for tensors, of {_human(memory_bytes())}",
        "connections": f"{settings.connections}, of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files allowed",
        "kernels": _kernels(),
    }
    yield from (f"{name:12} {text}" for name, text in rows.items())


def _check_host(settings: Settings) -> None:
    if settings.uds is None:
        _check_address(settings.host, settings.port)


def _check_ops_host(settings: Settings) -> None:
    if settings.ops_port is not None:
        _check_address(settings.ops_host, settings.ops_port)


def _check_address(host: str, port: int) -> None:
    """Raise `OSError` unless a socket can be bound to an address; that its port is free now is not checked."""
    # Binding needs a port; only the low ones need a permission.
    port = port if port < _PRIVILEGED else 0
    for family, kind, _, _, address in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise


def _check_path(settings: Settings) -> None:
    path = settings.uds
    if path is None:
        return
    if (length := len(os.fsencode(path))) > _LONGEST_PATH:
        raise ValueError(f"has {length} bytes, but the path of a Unix socket may have {_LONGEST_PATH}")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"the folder {path.parent} can't be written")
    if path.exists() and not path.is_socket():
        raise ValueError("is a file that is no socket")


def _check_readable(path: Path | None) -> None:
    if path is not None:
        path.read_bytes()


def _check_tls(settings: Settings) -> None:
    """Raise `OSError` unless the files have a certificate, its key and CAs."""
    if settings.tls_certificate is None:
        return
    password = settings.tls_key_password
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Without a function OpenSSL would ask for the password of a key on the terminal.
    context.load_cert_chain(
        settings.tls_certificate, settings.tls_key, lambda: "" if password is None else password.get_secret_value()
    )
    if settings.tls_client_ca is not None:
        context.load_verify_locations(settings.tls_client_ca)


def _check_extra(module: str, extra: str, *, needed: bool) -> None:
    """Raise `ValueError` if the package of an extra is needed and not installed."""
    try:
        missing = needed and find_spec(module) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ValueError(f"needs the package {module}: {install_hint(extra)}")


def _address(settings: Settings) -> str:
    if settings.uds is not None:
        return f"the Unix socket {settings.uds}"
    port = settings.port or "a free port"
    protocol = "HTTP" if settings.tls_certificate is None else "HTTPS"
    clients = "" if settings.tls_client_ca is None else ", for clients with a certificate"
    return f"{settings.host or 'all addresses'}, {port}, {protocol}{clients}"


def _ops_port(settings: Settings) -> str:
    return "none" if settings.ops_port is None else f"{settings.ops_host}, {settings.ops_port}, HTTP"


def _keys(settings: Settings) -> str:
    keys = make_key_ring(settings)
    return "not required" if keys is None else f"{len(keys)} known"


def _kernels() -> str:
    if not target().compiles:
        return f"{target()}: NumPy, nothing is compiled"
    verdict = read_verdict()
    if verdict is None:
        return f"{target()}: to be compiled at startup, in {cache_folder()}"
    return f"{target()}: {verdict.unfit or 'compiled'}, in {cache_folder()}"


def _human(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")
