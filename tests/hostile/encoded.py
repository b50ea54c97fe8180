"""Bodies that are no JSON, and tensors in base64 whose text has the right length."""

from __future__ import annotations

from typing import Any

from tests.hostile.apis import SECRET

__all__ = ["NOT_JSON", "in_base64"]


def in_base64(letters: str, text: str) -> dict[str, Any]:
    """Return a tensor whose data ends with this text, of the shape that its length is right for, if any is."""
    while (size := (len(letters) + len(text)) // 4 * 3 - text[-2:].count("=")) % 4:
        letters += "AAAA"
    return {"data": letters + text, "shape": [1, 1, max(size // 4, 1)]}


NOT_JSON: dict[str, bytes] = {
    "white space": b" \n\t ", "two documents": b"{}{}", "a comma at the end": b'{"a":1,}', "a comment": b"{}//",
    "single quotes": b"{'a':1}", "a bare name": b"{a:1}", "a leading zero": b'{"a":01}', "a plus": b'{"a":+1}',
    "hexadecimal digits": b'{"a":0x10}', "half a pair as a name": b'{"\\ude00":1}',
    "an unknown escape": b'{"a":"\\x41"}',
    "a line break in a string": b'{"a":"\n"}', "an open string": b'{"a":"' + SECRET.encode(),
    "an open list": b'{"a":[1,2',
    "lists without end": b"[" * 60_000, "objects without end": b'{"a":' * 20_000,
    "latin-1": '{"é":1}'.encode("latin-1"),
    "UTF-16": '{"a":1}'.encode("utf-16"), "UTF-32": '{"a":1}'.encode("utf-32"),
    "an overlong sequence": b'{"a":"\xc0\xaf"}',
    "surrogates in UTF-8": b'{"a":"\xed\xa0\xbd"}', "a zip file": b"PK\x03\x04" + bytes(500),
}  # fmt: skip
"""Bodies that are no JSON, by name."""
