"""TLS with client certificates issued by test authorities."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.app.samples import SMALL, digest, post, read, same_bits, wait_for
from tests.live import LiveService, running_service

KEY = "cg_the-key-of-a-client-with-a-certificate"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """The authority that the service trusts."""
    return trustme.CA()


@pytest.fixture(scope="module")
def service(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service that accepts only clients with a certificate of that authority, and a key."""
    folder: Path = tmp_path_factory.mktemp("tls")
    certificate, known = folder / "server.pem", folder / "ca.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(known))
    flags = ["--tls-certificate", str(certificate), "--tls-client-ca", str(known), "--workers", "1"]
    with running_service(*flags, CONVGRAD_KEYS=f"tester {digest(KEY)}") as service:
        yield service


def client(url: str, server_authority: trustme.CA, own_authority: trustme.CA | None) -> httpx.Client:
    """Return a client that trusts one authority, with a certificate of the other one if given."""
    trust = ssl.create_default_context()
    server_authority.configure_trust(trust)
    if own_authority is not None:
        own_authority.issue_cert("caller@example.org").configure_cert(trust)
    return httpx.Client(base_url=url, verify=trust, timeout=60, headers={"x-api-key": KEY})


@pytest.mark.heavy
def test_a_client_with_a_certificate_is_served(service: LiveService, authority: trustme.CA) -> None:
    """Its certificate and key give access to every API; the log of a call has the name of the key, never the key."""
    inputs = SMALL.inputs()
    assert service.url.startswith("https://")
    with client(service.url, authority, authority) as http:
        assert same_bits(read(post(http, SMALL, inputs)), SMALL.expected(inputs))
    wait_for(lambda: any("key=tester" in line for line in service.log))
    assert KEY not in "".join(service.log)


@pytest.mark.parametrize("stranger", [None, trustme.CA()], ids=["none", "of another authority"])
def test_a_client_without_one_is_not(service: LiveService, authority: trustme.CA, stranger: trustme.CA | None) -> None:
    """Without a certificate, or with one of another authority, even the health page is refused."""
    with client(service.url, authority, stranger) as http, pytest.raises(httpx.TransportError):
        http.get("/healthz")
