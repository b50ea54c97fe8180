"""Requests that offer another protocol, as Java's HTTP client does."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.app.bare import connected, replies, written
from tests.app.samples import LARGE, NPY, SMALL, document, parts, read_npy, read_tensor, same_bits
from tests.live import LiveService

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
BODY = b'{"jsonrpc": "2.0", "method": "ops.nothing", "id": 7}'
CHUNKED = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (BODY[:9], BODY[9:], b""))


def request(fields: bytes, body: bytes = b"", method: bytes = b"POST", path: bytes = b"/rpc") -> bytes:
    """Return a request that offers h2c."""
    return b"%s %s HTTP/1.1\r\nHost: localhost\r\n%s%s\r\n%s" % (method, path, OFFER, fields, body)


@pytest.mark.parametrize("step", [1, 50, 1 << 20])
def test_upgrade_headers_are_ignored(service: LiveService, step: int) -> None:
    """Bodies with a length and chunked ones arrive complete, however they are split; the connection stays open."""
    plain = request(b"Content-Length: %d\r\n" % len(BODY), BODY)
    sent = (
        plain
        + request(b"Transfer-Encoding: chunked\r\n", CHUNKED)
        + request(b"", method=b"GET", path=b"/v1/ops")
        + plain
    )
    with connected(service.url) as sock:
        for start in range(0, len(sent), step):
            sock.sendall(sent[start : start + step])
        first, second, third, fourth = (json.loads(body) for _, body in replies(sock, 4))
    assert third[0]["op"]
    for answer in (first, second, fourth):
        assert answer["id"] == 7
        assert "ops.nothing" in answer["error"]["data"]["detail"]


def test_a_large_body_after_an_upgrade_header(service: LiveService) -> None:
    """Tensors that are received directly into their memory arrive too, and so does the request after them."""
    inputs = LARGE.inputs()
    files, headers = parts(LARGE, inputs), {"accept": NPY}
    head, body = written(httpx.Request("POST", f"http://localhost/v1/ops/{LARGE.op}", files=files, headers=headers))
    with connected(service.url) as sock:
        sock.sendall(head.removesuffix(b"\r\n") + OFFER + b"\r\n" + body)
        ((_, content),) = replies(sock, 1)
        assert same_bits(read_npy(content, LARGE.dtype), LARGE.expected(inputs))
        sock.sendall(request(b"Content-Length: %d\r\n" % len(BODY), BODY))
        assert json.loads(replies(sock, 1)[0][1])["id"] == 7


def test_a_broken_body_after_an_upgrade_header(service: LiveService) -> None:
    """Invalid chunks end the connection with 400, as without an upgrade header."""
    with connected(service.url) as sock:
        sock.sendall(request(b"Transfer-Encoding: chunked\r\n", b"zz\r\n"))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("java") is None, reason="no Java here")
def test_java_makes_a_call(service: LiveService, tmp_path: Path) -> None:
    """Java's HTTP client, which always offers h2c, gets the right gradient with a declared length and with chunks."""
    inputs = SMALL.inputs()
    call = {"jsonrpc": "2.0", "method": SMALL.op, "params": document(SMALL, inputs), "id": 1}
    (tmp_path / "call.json").write_text(json.dumps(call))
    command = ["java", str(Path(__file__).with_name("Call.java")), f"{service.url}/rpc", str(tmp_path / "call.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        (output,) = json.loads(line)["result"]["outputs"].values()
        assert same_bits(read_tensor(output), SMALL.expected(inputs))
