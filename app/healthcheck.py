"""Check whether the service in this container is ready: the image's HEALTHCHECK, run with `python -I -S`.

It runs every few seconds, so it uses the standard library only. It reads the environment variables that say where the
service listens; it can't see flags of `convgrad serve`.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import sys

__all__ = ["main"]

_TIMEOUT_S = 3.0
# Addresses that mean all of the machine's, and the one to probe instead.
_PROBE_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


def main() -> int:
    """Print the service's answer, or why there is none; return 0 when it is ready, else 1."""
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
    """Open a connection by the settings; the ops port is preferred because it needs no certificate."""
    if ops_port := _setting("OPS_PORT"):
        host = _probe_address(_setting("OPS_HOST") or "127.0.0.1")
        return http.client.HTTPConnection(host, int(ops_port), timeout=_TIMEOUT_S)
    if path := _setting("UDS"):
        return _UnixConnection(path)
    host, main_port = _probe_address(_setting("HOST") or "127.0.0.1"), int(_setting("PORT") or 8000)
    if not _setting("TLS_CERTIFICATE"):
        return http.client.HTTPConnection(host, main_port, timeout=_TIMEOUT_S)
    if _setting("TLS_CLIENT_CA"):
        raise ValueError("clients need a certificate: set CONVGRAD_OPS_PORT, which needs none")
    # The certificate is for the service's public name, not for the loopback address.
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, main_port, timeout=_TIMEOUT_S, context=trust)


def _probe_address(host: str) -> str:
    return _PROBE_ADDRESSES.get(host, host)


def _setting(name: str) -> str:
    """Read a setting; an empty variable counts as unset."""
    return os.environ.get(f"CONVGRAD_{name}", "")


if __name__ == "__main__":
    sys.exit(main())
