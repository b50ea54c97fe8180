"""The key that signs checks, and what anybody with the public one can verify."""

from __future__ import annotations

import base64
import json
from itertools import product
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from convgrad._signature import fault_of, read_public_key
from engine.sealed.signing import Signer

DOCUMENT = {"b": [1, "é"], "a": {"y": None, "x": True}}


def test_anybody_can_verify_without_this_project() -> None:
    """The signature is that of Ed25519 over the document without it, as ASCII JSON, sorted, without spaces."""
    signed = Signer().signed(DOCUMENT)
    signature = signed.pop("signature")
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(signature["public_key"]))
    message = b'{"a":{"x":true,"y":null},"b":[1,"\\u00e9"]}'
    key.verify(base64.b64decode(signature["value"]), message)
    with pytest.raises(InvalidSignature):
        key.verify(base64.b64decode(signature["value"]), message.replace(b"1", b"2"))


def test_each_changed_byte_is_found() -> None:
    """No character of a signed record can be replaced without the verdict `changed`, `other_key` or `not_signed`."""
    text = json.dumps(Signer().signed(DOCUMENT))
    valid = []
    for at, other in product(range(len(text)), "01Aw+"):
        changed = text[:at] + other + text[at + 1 :]
        if changed == text:
            continue
        try:
            found = json.loads(changed)
        except ValueError:
            continue
        if fault_of(found) is None:
            valid.append(changed)
    assert fault_of(json.loads(text)) is None
    assert not valid


def test_a_key_file_is_made_once_and_kept(tmp_path: Path) -> None:
    """The first signer makes the file, for its owner only; later ones have the same key."""
    path = tmp_path / "key.pem"
    first = Signer(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["key.pem"]
    assert Signer(path).public == first.public
    assert Signer(path).verified(first.signed(DOCUMENT))["valid"]
    assert Signer().verified(first.signed(DOCUMENT))["reason"] == "other_key"


@pytest.mark.parametrize("content", [b"", b"secret", "other"])
def test_a_file_with_another_key_is_refused(tmp_path: Path, content: bytes | str) -> None:
    """A file without an Ed25519 key in PEM is an error at startup, and stays as it is."""
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = tmp_path / "key.pem"
    path.write_bytes(given := other if isinstance(content, str) else content)
    with pytest.raises(ValueError, match="must be a PEM file with an Ed25519 key"):
        Signer(path)
    assert path.read_bytes() == given


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """A key can't be made in a folder that does not exist."""
    with pytest.raises(OSError, match="No such file"):
        Signer(tmp_path / "nowhere" / "key.pem")


def test_public_keys_are_read_from_text_and_files(tmp_path: Path) -> None:
    """Base64, a file with it, and a file with the page of the key are the same key; anything else is refused."""
    public = Signer().public
    path, page = tmp_path / "key", tmp_path / "page"
    path.write_text(public["public_key"] + "\n")
    page.write_text(json.dumps(public))
    expected = base64.b64decode(public["public_key"])
    assert [read_public_key(str(each)) for each in (public["public_key"], path, page)] == [expected] * 3
    for wrong in ("", "A" * 40, str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match="base64 of 32 bytes"):
            read_public_key(wrong)
