"""Ask the service of this container whether it is ready: what the image's HEALTHCHECK runs, with `python -I -S`.

It runs every few seconds, so it is plain Python, without the library of the settings. It reads the variables that say
where the service listens; flags of `convgrad serve` it can't see.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import sys

__all__ = ["main"]

_TIMEOUT_S = 3.0
# An address to listen on that stands for all, and one of them to ask at.
_ASKED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


def main() -> int:
    """Return 0 when the service is ready; otherwise print why not and return 1."""
    try:
        connection = _connection()
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        said = reply.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"the service does not answer: {error!r}")  # noqa: T201
        return 1
    print(said)  # noqa: T201
    return int(reply.status != http.client.OK)


def _connection() -> http.client.HTTPConnection:
    """Make a connection to where the settings say; the operators' port comes first, for it needs no certificate."""
    if ops_port := _setting("OPS_PORT"):
        host = _asked_at(_setting("OPS_HOST") or "127.0.0.1")
        return http.client.HTTPConnection(host, int(ops_port), timeout=_TIMEOUT_S)
    if path := _setting("UDS"):
        return _UnixConnection(path)
    host, main_port = _asked_at(_setting("HOST") or "127.0.0.1"), int(_setting("PORT") or 8000)
    if not _setting("TLS_CERTIFICATE"):
        return http.client.HTTPConnection(host, main_port, timeout=_TIMEOUT_S)
    if _setting("TLS_CLIENT_CA"):
        raise ValueError("it takes only clients with a certificate: set CONVGRAD_OPS_PORT, where none is asked for")
    # Its certificate has the name that others know it by.
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, main_port, timeout=_TIMEOUT_S, context=trust)


def _asked_at(host: str) -> str:
    return _ASKED_AT.get(host, host)


def _setting(name: str) -> str:
    """Read a setting; a variable without a value counts as unset."""
    return os.environ.get(f"CONVGRAD_{name}", "")


if __name__ == "__main__":
    sys.exit(main())
