"""`--check` reads all settings and files and describes the service, but starts nothing."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from kernels.target import NAME

pytestmark = pytest.mark.heavy


def check(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the service with `--check`."""
    command = [sys.executable, "-m", "app", "--check", *flags]
    settings = {**os.environ, NAME: "reference", **environment}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=settings, timeout=60)


def test_check_describes_the_service(tmp_path: Path) -> None:
    """Addresses, keys, workers, memory and kernels are listed with status 0, even while the port is in use."""
    keys = tmp_path / "keys"
    keys.write_text(f"a sha256:{hashlib.sha256(b'1').hexdigest()}\n", encoding="utf-8")
    certificate = trustme.CA().issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "pem"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        flags = ["--port", port, "--keys-file", str(keys), "--tls-certificate", str(tmp_path / "pem"), "--workers", "3"]
        done = check(*flags, CONVGRAD_MEMORY_LIMIT="64MiB", CONVGRAD_DRAIN="1")
    assert done.returncode == 0
    rows = {line[:12].strip(): line[13:] for line in done.stdout.splitlines()}
    assert rows["listens on"] == f"127.0.0.1, {port}, HTTPS"
    assert rows["keys"] == "1 known"
    assert rows["workers"].startswith("3, on ")
    assert rows["memory"].startswith("64.0 MiB for tensors, of ")
    assert rows["kernels"] == "reference: NumPy, nothing is compiled"
    assert "CONVGRAD_DRAIN is not a setting and is ignored; did you mean CONVGRAD_DRAIN_S?" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory-limit", "10"], "memory_limit: must be at least 1.0 MiB, or 0, but is 10: each tensor"),
        (["--tls-certificate", "/nowhere"], "tls_certificate: /nowhere: No such file"),
        (["--tls-certificate", __file__], "tls_certificate, tls_key and tls_client_ca must be"),
        (["--keys-file", __file__], "keys_file: line 1 does not have the form"),
        (["--uds", "/nowhere/socket"], "uds: the folder /nowhere does not exist"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_errors_name_the_setting(flags: list[str], message: str) -> None:
    """For a value or a file that can't be used, the status is 2 and a line names the setting."""
    done = check(*flags)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert not done.stdout
