"""HTTPS with the client and the command: whom they trust, and the certificates that they show."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

import convgrad
from convgrad import AsyncClient, Client
from convgrad._cli import main
from tests.convgrad.server import Server, running

OPS = [{"op": "Op", "aliases": [], "summary": "Compute it."}]
ONCE = convgrad.Retry(attempts=1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """The authority of the server, and the only one whose clients it accepts."""
    return trustme.CA()


@pytest.fixture
def url(authority: trustme.CA) -> Iterator[str]:
    """The address of a server that speaks TLS and asks for a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(context)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = Server()
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.script += [
        lambda handler, _: handler.reply(200, b'[{"op": "Op", "aliases": [], "summary": "Compute it."}]')
    ] * 4
    with running(server):
        yield server.url.replace("http:", "https:")


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    """PEM files: the authority, a certificate with its key, and both of them alone."""
    issued = authority.issue_cert("caller@example.org")
    parts = {"both": issued.private_key_and_cert_chain_pem, "cert": issued.cert_chain_pems[0]}
    parts |= {"key": issued.private_key_pem, "ca": authority.cert_pem, "other": trustme.CA().cert_pem}
    for name, pem in parts.items():
        pem.write_to_path(str(tmp_path / f"{name}.pem"))
    return {name: str(tmp_path / f"{name}.pem") for name in parts}


def test_the_clients(url: str, files: dict[str, str]) -> None:
    """Both take files, the certificate with its key in one or two, or a TLS context; `verify=False` trusts anyone."""
    context = ssl.create_default_context(cafile=files["ca"])
    context.load_cert_chain(files["both"])
    trusts: list[dict[str, Any]] = [
        {"verify": context},
        *({"verify": trust, "cert": files["both"]} for trust in (files["ca"], False)),
    ]
    for trust in trusts:
        with Client(url, **trust, retry=ONCE) as client:
            assert client.operations() == OPS

    async def call() -> object:
        async with AsyncClient(url, verify=files["ca"], cert=(files["cert"], files["key"]), retry=ONCE) as client:
            return await client.operations()

    assert asyncio.run(call()) == OPS


def test_the_command(
    url: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--cacert, --cert and --key name the files; CONVGRAD_CACERT, CONVGRAD_CERT and CONVGRAD_CERT_KEY do so too."""
    flags = ["--cacert", files["ca"], "--cert", files["cert"], "--key", files["key"]]
    assert main(["ops", "--url", url, *flags]) == 0
    for name, file in {"CACERT": "ca", "CERT": "cert", "CERT_KEY": "key"}.items():
        monkeypatch.setenv(f"CONVGRAD_{name}", files[file])
    assert main(["ops", "--url", url]) == 0
    assert capsys.readouterr().out.count("Op - ") == 2
    with Client(url, retry=ONCE) as client:
        assert client.operations() == OPS


@pytest.mark.parametrize("trust", [None, "other"])
def test_an_authority_that_is_not_trusted(url: str, files: dict[str, str], trust: str | None) -> None:
    """Without the server's authority there is no connection, and the error says why and where."""
    with (
        Client(url, verify=files[trust] if trust else None, cert=files["both"], retry=ONCE) as client,
        pytest.raises(convgrad.ConnectFailed, match="certificate verify failed") as caught,
    ):
        client.operations()
    assert url in str(caught.value)


def test_without_a_certificate(url: str, files: dict[str, str]) -> None:
    """A server that asks for a certificate refuses a client without one; that is an error of the transport."""
    with Client(url, verify=files["ca"], retry=ONCE) as client, pytest.raises(convgrad.TransportError):
        client.operations()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--cacert", "missing.pem"], "missing.pem must be a PEM file of certificates"),
        (["--cacert", "key"], "must be a PEM file of certificates"),
        (["--cert", "missing.pem"], "missing.pem must be PEM files"),
        (["--cert", "both", "--key", "ca"], "and its private key"),
        (["--key", "key"], "--key needs --cert"),
    ],
)
def test_unusable_files(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    """A file that is missing or is not what it should be is named, before anything is sent."""
    named = [files.get(flag, flag) for flag in flags]
    assert main(["health", "--url", "https://127.0.0.1:1", *named]) == 2
    assert reason in capsys.readouterr().err
