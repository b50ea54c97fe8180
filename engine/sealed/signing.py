"""Sign JSON documents with HMAC-SHA256, and verify them."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

__all__ = ["Signer"]

_MEMBER = "signature"
_ALGORITHM = "HMAC-SHA256"


class Signer:
    """Signs with a secret key, by default a random one, which ends with the process.

    `key_id` identifies the key without revealing it. The signed message is the document without its signature: JSON in
    ASCII with sorted names and no spaces.
    """

    def __init__(self, key: str | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key.encode()
        self.key_id = self._digest(b"key id")[:16]

    def signed(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document with its signature."""
        signature = {"algorithm": _ALGORITHM, "key_id": self.key_id, "value": self._digest(_canonical(document))}
        return {**document, _MEMBER: signature}

    def verified(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return whether the document is one that this key signed, and if not, why: `valid`, `reason`, `key_id`."""
        reason = self._fault(document)
        return {"valid": reason is None, "reason": reason, "key_id": self.key_id}

    def _fault(self, document: Mapping[str, Any]) -> str | None:
        given = document.get(_MEMBER)
        if not isinstance(given, Mapping) or not isinstance(given.get("value"), str):
            return "not_signed"
        if given.get("key_id") != self.key_id or given.get("algorithm") != _ALGORITHM:
            return "other_key"
        rest = {name: value for name, value in document.items() if name != _MEMBER}
        try:  # the whole documents are compared, so that `signature` has no members but its own
            same = hmac.compare_digest(_canonical(self.signed(rest)), _canonical(document))
        except TypeError:  # a long string under a tensor's name
            return "changed"
        return None if same else "changed"

    def _digest(self, message: bytes) -> str:
        return hmac.digest(self._key, b"convgrad\n" + message, "sha256").hex()


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
