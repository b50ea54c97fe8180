"""The command that the image's HEALTHCHECK runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from tests.live import running_service

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]


def check(**settings: str) -> subprocess.CompletedProcess[str]:
    """Run the command from the Dockerfile with only these settings."""
    found = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    command = [sys.executable, *json.loads(found[1])[1:]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CONVGRAD_")}
    environment |= {f"CONVGRAD_{name.upper()}": value for name, value in settings.items()}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def certificate(tmp_path: Path) -> str:
    """A certificate for a public name."""
    path = tmp_path / "server.pem"
    trustme.CA().issue_cert("grad.example").private_key_and_cert_chain_pem.write_to_path(str(path))
    return str(path)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "0.0.0.0", "::"])
def test_the_health_check_uses_the_host_of_the_service(host: str, certificate: str) -> None:
    """It finds the service on its own host or on all hosts, with TLS and a certificate for another name."""
    settings = {"host": host, "public": "true", "allowed_hosts": "grad.example", "tls_certificate": certificate}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", value)]
    with running_service(*flags, "--workers", "1") as service:
        done = check(**settings, port=str(urlsplit(service.url).port))
        assert (done.returncode, json.loads(done.stdout)["status"]) == (0, "ready")
        plain = check(**settings | {"tls_certificate": ""}, port=str(urlsplit(service.url).port))
        assert (plain.returncode, plain.stderr) == (1, "")


def test_the_health_check_uses_unix_socket_and_operators_port(tmp_path: Path) -> None:
    """Either is sufficient; if nothing listens, the check fails and says so."""
    path = str(tmp_path / "convgrad.sock")
    with running_service("--uds", path, "--ops-port", "0", "--workers", "1") as service:
        (port,) = re.findall(r"health and metrics at http://127.0.0.1:(\d+)", "".join(service.log))
        for settings in ({"uds": path}, {"uds": "/nowhere", "ops_port": port}):
            assert check(**settings).returncode == 0
    gone = check(uds=path)
    assert gone.returncode == 1
    assert "does not answer" in gone.stdout


def test_a_certificate_of_the_client_needs_the_operators_port(certificate: str) -> None:
    """The check has no client certificate, and says which setting to use."""
    done = check(tls_certificate=certificate, tls_client_ca="ca.pem")
    assert done.returncode == 1
    assert "CONVGRAD_OPS_PORT" in done.stdout
