"""The multipart request body: one JSON part and `.npy` files, with a length known in advance."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from convgrad._errors import InvalidParams
from convgrad._tensors import PIECE, Bytes, Part

__all__ = ["Body", "checked", "joined", "multipart"]

_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
# Smaller pieces are cheaper to copy than to send separately.
_LARGE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request: each call of `pieces()` gives exactly `length` bytes."""

    content_type: str
    length: int
    pieces: Callable[[], Iterable[Bytes]]
    headers: Mapping[str, str] = field(default_factory=dict)


def multipart(request: bytes, parts: Mapping[str, Part], mark: str | None = None) -> Body:
    """Build a body of the JSON `request` and a `.npy` part for each tensor, named like it.

    `mark` makes its boundary, which by default is random; the parts must not contain it.
    """
    boundary = f"convgrad-{mark or secrets.token_hex(16)}"
    heads = [_head(boundary, "request", "application/json") + request]
    heads += [b"\r\n" + _head(boundary, checked(name), "application/x-npy") for name in parts]
    tail = f"\r\n--{boundary}--\r\n".encode()
    length = sum(map(len, heads)) + sum(part.nbytes for part in parts.values()) + len(tail)

    def pieces() -> Iterator[Bytes]:
        yield heads[0]
        for head, part in zip(heads[1:], parts.values(), strict=True):
            yield head
            yield from part.pieces()
        yield tail

    return Body(f"multipart/form-data; boundary={boundary}", length, lambda: joined(pieces()))


def _head(boundary: str, name: str, content_type: str) -> bytes:
    file = "" if name == "request" else f'; filename="{name}.npy"'
    disposition = f'Content-Disposition: form-data; name="{name}"{file}'
    return f"--{boundary}\r\n{disposition}\r\nContent-Type: {content_type}\r\n\r\n".encode()


def checked(name: str) -> str:
    """Return the name of an input; raises `InvalidParams` when it can't name a part."""
    if name == "request" or not _NAME.fullmatch(name):
        message = "an input's name must be letters, digits and underscores, and not `request`"
        raise InvalidParams(message, errors=[{"loc": ["inputs"], "msg": message, "type": "name"}])
    return name


def joined(pieces: Iterable[Bytes]) -> Iterator[Bytes]:
    """Join small pieces, so that a small call takes one write to the socket."""
    small = bytearray()
    for piece in pieces:
        if len(piece) < _LARGE and len(small) < PIECE:
            small += piece
            continue
        if small:
            yield bytes(small)
            small.clear()
        yield piece
    if small:
        yield bytes(small)
