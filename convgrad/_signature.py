"""Signatures of sealed checks: Ed25519 over canonical JSON, verified without a service by the public key."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convgrad._launch import install_hint

__all__ = ["ALGORITHM", "MEMBER", "canonical", "fault_of", "key_id", "read_public_key", "require_cryptography"]

ALGORITHM = "Ed25519"
MEMBER = "signature"
_PARTS = {"algorithm", "key_id", "public_key", "value"}
_KEY_BYTES = 32


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return what is signed of a document: all but its signature, as ASCII JSON with sorted names and no spaces."""
    rest = {name: value for name, value in document.items() if name != MEMBER}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


def key_id(public: bytes) -> str:
    """Return the short name of a public key: the beginning of its SHA-256."""
    return hashlib.sha256(public).hexdigest()[:16]


def fault_of(document: Mapping[str, Any], public: bytes | None = None) -> str | None:
    """Return why a document's signature is not valid: `not_signed`, `other_key` or `changed`; None if it is valid.

    `public` is the key that must have signed it, by default the one in the document. Raises `ImportError` without the
    package cryptography.
    """
    require_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    given = document.get(MEMBER)
    if not isinstance(given, Mapping) or given.get("algorithm") != ALGORITHM:
        return "not_signed"
    key, value = _decoded(given.get("public_key")), _decoded(given.get("value"))
    if len(key) != _KEY_BYTES or (public is not None and key != public):
        return "other_key"
    if given.keys() != _PARTS or given["key_id"] != key_id(key):
        return "changed"
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(value, canonical(document))
    except (InvalidSignature, TypeError):  # in a service, a long string is no text for `json`
        return "changed"
    return None


def read_public_key(text: str) -> bytes:
    """Return a public key, given in base64 or as a file with it or with the reply of `/v1/checks/key`.

    Raises `ValueError` for anything else.
    """
    if Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8").strip()
        text = str(json.loads(text).get("public_key")) if text.startswith("{") else text
    if len(key := _decoded(text)) != _KEY_BYTES:
        raise ValueError(f"a public key must be the base64 of {_KEY_BYTES} bytes, or a file with it")
    return key


def require_cryptography() -> None:
    """Raise `ImportError` with how to install it if the package cryptography is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        hint = install_hint("sign")
        raise ImportError(f"signatures of checks need the package cryptography: {hint}") from None


def _decoded(text: object) -> bytes:
    """Return the bytes of base64 as it is usually written; empty for anything else."""
    try:
        found = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return b""
    return found if base64.b64encode(found).decode() == text else b""
