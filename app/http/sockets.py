"""The sockets that the service listens on."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

__all__ = ["BACKLOG", "address_of", "bind"]

BACKLOG = 65535
"""As many pending connections as the system allows (`net.core.somaxconn`)."""

# Owner and group may connect, as far as the umask lets them.
_SOCKET_MODE = 0o660


def bind(host: str, port: int, path: Path | None = None) -> list[socket.socket]:
    """Bind all addresses of a host, or a path; raises `OSError` if one can't be bound."""
    if path is not None:
        return [_bind_path(path)]
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(infos):
            listeners.append(listener := socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address[:2])
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise OSError(error.errno, f"{error.strerror}: {host}, {port}") from None
    return listeners


def _bind_path(path: Path) -> socket.socket:
    if path.is_socket():
        _check_nobody_listens(path)
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux creates the file with the mode of the socket, less the umask: nobody else can open it, not for a moment.
        os.fchmod(listener.fileno(), _SOCKET_MODE)
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    return listener


def _check_nobody_listens(path: Path) -> None:
    """Raise `OSError` unless the socket was left behind by a process that has exited."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # a full backlog is an answer too
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, f"another process listens on the Unix socket {path}: stop it, or set another uds")


def address_of(listener: socket.socket, *, secure: bool) -> str:
    """Return the URL of a bound socket."""
    name = listener.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if secure else 'http'}://{host}:{name[1]}"
