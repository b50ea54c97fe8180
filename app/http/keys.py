"""API keys: names, checksums and limits in a file, which is read again when it changes, or in a variable.

A request has its key in `Authorization: Bearer` or `X-API-Key`, where the service has keys (`Authentication`).

One key per line; `#` begins a comment::

    team-a  sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  calls=8

`convgrad keys team-a` creates a key and its line. A key has 256 random bits, so a plain SHA-256 of it can't
be reversed by search, and reading the file gives nobody access.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.telemetry.context import ANYONE, MONITORED
from convgrad._command.exits import say
from convgrad._command.keys import add_key_flags
from convgrad._command.parser import Parser
from convgrad._errors import Unauthorised
from convgrad._keys import checked_key

if TYPE_CHECKING:  # the command needs no server
    from app.http.exchange import Exchange
    from app.settings import Settings

__all__ = ["FREE_PAGES", "Authentication", "Key", "KeyRing", "main", "make_key_ring", "parse_keys"]

_log = logging.getLogger("convgrad")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LIMIT = re.compile(r"calls=([1-9][0-9]{0,5})")
_LONGEST = 1024
_SHORTEST = 16
_LARGEST_FILE = 1 << 20
# A change of the file is noticed within this time.
_CHECK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Key:
    """A key: its id for logs, its SHA-256, and how many calls it may have at a time."""

    name: str
    digest: bytes
    calls: int | None = None


def parse_keys(text: str) -> tuple[Key, ...]:
    """Parse the lines of a key file; `;` also ends a line, for secrets that have to be one line.

    Raises `ValueError`, which gives the number of the line and never its text.
    """
    keys: list[Key] = []
    for number, line in enumerate(text.replace(";", "\n").splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            keys.append(_parse_line(words, number))
    return _all_different(keys)


def _all_different(keys: Sequence[Key]) -> tuple[Key, ...]:
    for what in ("name", "digest"):
        values = [getattr(key, what) for key in keys]
        if len(set(values)) < len(values):
            raise ValueError(f"two keys have the same {what}")
    return tuple(keys)


def _parse_line(words: Sequence[str], number: int) -> Key:
    name, digest = words[0], _DIGEST.fullmatch(words[1]) if len(words) > 1 else None
    limits = [_LIMIT.fullmatch(word) for word in words[2:]]
    if name == ANYONE:
        raise ValueError(f"line {number}: a key can't be named {ANYONE}, which is the name for requests without a key")
    if not _NAME.fullmatch(name) or digest is None or len(limits) > 1 or None in limits:
        raise ValueError(f"line {number} does not have the form NAME sha256:HEX [calls=N]")
    return Key(name, bytes.fromhex(digest[1]), int(limits[0][1]) if limits and limits[0] else None)


class KeyRing:
    """The keys of a file, which is read again when it changes, and of a text.

    Raises `ValueError` or `OSError` when there are no keys at startup, or they can't be read. Later, the keys read last
    stay valid while the file can't be read or is empty, so that a mistake in it locks nobody out.
    """

    def __init__(self, *, file: Path | None = None, text: str = "") -> None:
        self._file = file
        self._checked = time.monotonic()
        self._fixed = parse_keys(text)
        self._stamp = _stamp(file)
        self._keys = self._read()

    def __len__(self) -> int:
        """Count the keys that are valid now."""
        return len(self._keys)

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret, or None."""
        self._reload_if_changed()
        if len(secret) > _LONGEST:
            return None
        # The time that this takes depends on the digest only, which nobody can choose.
        return self._keys.get(hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest())

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._checked < _CHECK_EVERY_S:
            return
        self._checked = now
        try:
            stamp = _stamp(self._file)
            if stamp != self._stamp:
                self._keys, self._stamp = self._read(), stamp
                _log.info("reloaded %d API keys", len(self._keys))
        except (OSError, ValueError) as error:
            _log.error("the API keys can't be reloaded, the previous ones stay valid: %s", error)

    def _read(self) -> dict[bytes, Key]:
        text = "" if self._file is None else _text_of(self._file)
        keys = _all_different([*self._fixed, *parse_keys(text)])
        if not keys:
            how = "convgrad keys NAME" if self._file is None else f"convgrad keys NAME --file {self._file}"
            raise ValueError(f"there is no key, and every call would be rejected: {how} creates one")
        return {key.digest: key for key in keys}


def _text_of(file: Path) -> str:
    """Read a key file; raises `OSError`, and `ValueError` if it is none."""
    with file.open("rb") as opened:
        text = opened.read(_LARGEST_FILE + 1)
    if len(text) > _LARGEST_FILE:
        raise ValueError(f"a key file may have {_LARGEST_FILE >> 20} MiB")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8: is this a key file?") from None


def _stamp(file: Path | None) -> tuple[int, ...]:
    if file is None:
        return ()
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


# The descriptions of the APIs are the same in every installation.
FREE_PAGES = MONITORED | {"/openapi.json", "/openrpc.json"}
"""Pages that need no key; `/metrics` only without a separate ops port."""


def make_key_ring(settings: Settings) -> KeyRing | None:
    """Read the keys that the settings name; None when they name none, and no key is required.

    Raises `OSError` or `ValueError` when they can't be read, or are none.
    """
    if not settings.has_keys:
        return None
    return KeyRing(file=settings.keys_file, text="" if settings.keys is None else settings.keys.get_secret_value())


class Authentication:
    """Accept requests with a known key, and requests for `free` pages."""

    def __init__(self, keys: KeyRing, free: Collection[str] = FREE_PAGES) -> None:
        self._keys = keys
        self._free = free

    def check(self, exchange: Exchange) -> None:
        """Set the key of the request, or `Exchange.deny` it."""
        if exchange.scope["path"] in self._free:
            return
        context, secret = exchange.context, _secret(exchange.headers)
        if secret is None:
            message = "this service requires an API key, in Authorization: Bearer or X-API-Key"
            exchange.deny(Unauthorised(message, data={"reason": "no_key"}))
        elif (key := self._keys.find(secret)) is None:
            exchange.deny(Unauthorised("this API key is not valid", data={"reason": "unknown_key"}))
        else:
            context.key, context.calls_limit = key.name, key.calls


def _secret(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def main(arguments: Sequence[str] | None = None) -> int:
    """Create an API key: its line goes to standard output or a key file, the key itself to standard error only."""
    parser = Parser(prog="convgrad keys", description=main.__doc__)
    add_key_flags(parser)
    try:
        options = parser.parse_args(arguments)
        secret = sys.stdin.readline().strip() if options.stdin else f"cg_{secrets.token_urlsafe(32)}"
        line = _line(options.name, secret, options.calls)
        if options.file is None:
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            _add(Path(options.file), line)
    except (OSError, ValueError) as error:
        say(str(error))
        return 2
    if not options.stdin:
        os.write(2, f"the key, shown only once: {secret}\n".encode())
    return 0


def _line(name: str, secret: str, calls: int | None) -> str:
    """Return the line of a key; raises `ValueError`, which does not contain the key."""
    checked_key(secret)
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise ValueError(f"a key must have {_SHORTEST} to {_LONGEST} characters, but has {len(secret)}")
    if name == ANYONE or not _NAME.fullmatch(name):
        raise ValueError(f"NAME must not be {ANYONE}, and must have 1 to 64 letters, digits, '.', '_' and '-'")
    limit = "" if calls is None else f" calls={calls}"
    if limit and not _LIMIT.fullmatch(limit.strip()):
        raise ValueError(f"--calls must be from 1 to 999999, but is {calls}")
    return f"{name} sha256:{hashlib.sha256(secret.encode()).hexdigest()}{limit}\n"


def _add(path: Path, line: str) -> None:
    """Append a line to a key file, which is created for its owner only.

    Raises `ValueError` if the file has a wrong line, or the key or its name already, and `OSError`.
    """
    with open(path, "a+", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = file.read()
        line = ("\n" if before and not before.endswith("\n") else "") + line
        try:
            parse_keys(before + line)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        file.write(line)


if __name__ == "__main__":
    sys.exit(main())
