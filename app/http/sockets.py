"""The sockets that the service listens on."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

__all__ = ["BACKLOG", "address_of", "listen"]

BACKLOG = 65535
"""As many pending connections as the system allows (`net.core.somaxconn`)."""

# Owner and group may connect, as far as the umask lets them.
_SOCKET_MODE = 0o660


def listen(host: str, port: int, path: Path | None = None) -> list[socket.socket]:
    """Listen on all addresses of a host, or on a path; raises `OSError` if one is taken."""
    if path is not None:
        return [_listen_at(path)]
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [
        socket.create_server(address[:2], family=family, backlog=BACKLOG)
        for family, _, _, _, address in dict.fromkeys(infos)
    ]


def _listen_at(path: Path) -> socket.socket:
    if path.is_socket():
        _check_nobody_listens(path)
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux creates the file with the mode of the socket, less the umask: nobody else can open it, not for a moment.
        os.fchmod(listener.fileno(), _SOCKET_MODE)
        listener.bind(str(path))
        listener.listen(BACKLOG)
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
