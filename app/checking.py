"""Check settings and the files they name, and describe what a service would do with them, without starting it."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from pydantic import ByteSize

from app.http.authentication import make_key_ring
from app.settings import Settings
from engine.container import cpu_count, memory_bytes
from kernels.emit.cache import cache_folder
from kernels.prepare import read_verdict
from kernels.target import target

__all__ = ["check_tls_files", "describe"]


def check_tls_files(settings: Settings) -> None:
    """Raise `ValueError`, with the setting's name, when a TLS file can't be read."""
    for name in ("tls_certificate", "tls_key", "tls_client_ca"):
        path: Path | None = getattr(settings, name)
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise ValueError(f"{name}: {path}: {error.strerror}") from None


def describe(settings: Settings) -> Iterator[str]:
    """Yield a line for each thing the service would do; raises `OSError` or `ValueError` for one it can't do."""
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


def _address(settings: Settings) -> str:
    if settings.uds is not None:
        if not settings.uds.parent.is_dir():
            raise ValueError(f"uds: the folder {settings.uds.parent} does not exist")
        return f"the Unix socket {settings.uds}"
    try:
        socket.getaddrinfo(settings.host or None, settings.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(f"host: {settings.host}: {error.strerror}") from None
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
