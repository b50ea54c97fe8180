"""The key that signs the records of sealed checks: of a file, or random until the process ends."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from convgrad._signature import ALGORITHM, MEMBER, canonical, fault_of, key_id, require_cryptography

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["Signer"]


class Signer:
    """Signs records with Ed25519.

    The key is that of a PEM file (PKCS 8, as `openssl genpkey -algorithm ed25519` writes), which is made if it is
    missing; without a file it is random. Raises `OSError`, and `ValueError` if the file has no such key.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        if file is not None:  # a wrong file is an error at startup; a random key is made when it is first needed
            assert self._key

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.generate() if self._file is None else _key_in(self._file)

    @cached_property
    def _public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    @property
    def public(self) -> dict[str, str]:
        """The public key as JSON: `algorithm`, `key_id`, and `public_key`, the base64 of its 32 bytes."""
        text = base64.b64encode(self._public).decode()
        return {"algorithm": ALGORITHM, "key_id": self.key_id, "public_key": text}

    @property
    def key_id(self) -> str:
        """The short name of the key."""
        return key_id(self._public)

    def signed(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document with its signature."""
        value = base64.b64encode(self._key.sign(canonical(document))).decode()
        return {**document, MEMBER: {**self.public, "value": value}}

    def verified(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return whether this key signed the document, and if not, why: `valid`, `reason`, `key_id`."""
        reason = fault_of(document, self._public)
        return {"valid": reason is None, "reason": reason, "key_id": self.key_id}


def _key_in(file: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if not file.exists():
        _make(file)
    try:
        key = load_pem_private_key(file.read_bytes(), None)
    except (TypeError, ValueError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{file} must be a PEM file with an Ed25519 key without a passphrase")
    return key


def _make(file: Path) -> None:
    """Write a new key for its owner only; of replicas that start at once the first one's stays."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    text = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with NamedTemporaryFile(dir=file.parent) as new:  # mode 0600
        new.write(text)
        new.flush()
        os.fsync(new.fileno())
        with suppress(FileExistsError):
            os.link(new.name, file)
