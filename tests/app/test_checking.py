"""Settings that can't be are refused, with `--dry-run`, which starts nothing, as at a real start."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from app.checking import BrokenSettings, read_settings, warnings
from app.flags import parse_flags
from convgrad._command.exits import UsageError
from engine.container import memory_bytes
from kernels.target import NAME

pytestmark = pytest.mark.heavy


def check(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the service with `--dry-run`."""
    command = [sys.executable, "-m", "app", "--dry-run", *flags]
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
        (["--tls-certificate", "/nowhere"], "--tls-certificate /nowhere: can't be used: No such file"),
        (["--keys-file", os.devnull], "--keys-file /dev/null: there is no key, and every call would be rejected: "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "start"])
def test_a_broken_setting_ends_the_process(flags: list[str], message: str, dry: list[str]) -> None:
    """For a value or a file that can't be used, a start and a dry run end with status 2 and the same line."""
    command = [sys.executable, "-m", "app", *dry, *flags]
    environment = {**os.environ, NAME: "reference"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def refused(*flags: str) -> list[str]:
    """Return the lines with which the settings of flags are refused."""
    with pytest.raises(BrokenSettings) as caught:
        read_settings(parse_flags(flags)[0])
    return str(caught.value).splitlines()


LONG = f"/tmp/{'a' * 200}"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--port x", "--port x: must be a whole number"),
        ("--port 70000", "--port 70000: must be at most 65535"),
        ("--workers=-1", "--workers -1: must be at least 0"),
        ("--deadline-s 0", "--deadline-s 0: must be more than 0"),
        ("--deadline-s fast", "--deadline-s fast: must be a number"),
        ("--deadline-s nan", "--deadline-s nan: must be at most 86400"),
        ("--public ture", "--public ture: must be true or false"),
        ("--body-limit 1zb", "--body-limit 1zb: must be a size, such as 512MiB"),
        ("--body-limit lots", "--body-limit lots: must be a size, such as 512MiB"),
        ("--work-limit 1e99x", "--work-limit 1e99x: must be a whole number"),
        ("--engine rya", "--engine rya: must be local or ray"),
        ("--sealed-key secret", "--sealed-key: must have at least 16 characters"),
        ("--keys secret", "--keys: line 1 does not have the form NAME sha256:HEX [calls=N]"),
        ("--keys ;", "--keys: there is no key, and every call would be rejected: convgrad keys NAME creates one"),
        ("--keys-file /", "--keys-file /: can't be used: Is a directory"),
        ("--keys-file /dev/zero", "--keys-file /dev/zero: a key file may have 1 MiB"),
        ("--cors example.org", "--cors example.org: must be origins such as https://example.org, without a path, or *"),
        ("--cors https://a.org/", "--cors https://a.org/: must be origins"),
        ("--cors [x", "--cors '[x': must be a list, separated by commas or in JSON"),
        ("--allowed-hosts http://a.org", "--allowed-hosts http://a.org: must be host names and addresses without"),
        ("--tls-key k", "--tls-key k: needs --tls-certificate"),
        (f"--tls-certificate {__file__}", f"--tls-certificate {__file__}: certificate, key and CAs"),
        ("--host 0.0.0.0", "--host 0.0.0.0: must be a loopback address while there are no API keys"),
        ("--host 192.0.2.1 --public true", "--host 192.0.2.1: can't be used: Cannot assign requested address"),
        ("--host http://a --public true", "--host http://a: can't be used: Name or service not known"),
        ("--host a..b --public true", "--host a..b: is not a host name or an address"),
        ("--ops-host 192.0.2.1 --ops-port 0", "--ops-host 192.0.2.1: can't be used: Cannot assign"),
        ("--ops-port 8000", "--ops-port 8000: is the port of the service (--port)"),
        ("--uds /nowhere/socket", "--uds /nowhere/socket: the folder /nowhere does not exist"),
        (f"--uds {LONG}", f"--uds {LONG}: has 205 bytes, but the path of a Unix socket may have 107"),
        (f"--uds {__file__}", f"--uds {__file__}: is a file that is no socket"),
        ("--memory-limit 10", "--memory-limit 10: must be at least 1.0 MiB, or 0: each tensor of a call"),
        ("--memory-limit 1EB", "--memory-limit 1EB: is more than the memory of this machine or container, "),
        ("--body-limit 1EB", "--body-limit 1EB: is more than the memory of this machine or container, "),
        ("--output-limit 1EB", "--output-limit 1EB: is more than the memory for the tensors of all calls"),
        ("--memory-limit 1MiB --sealed-memory 2MiB", "--sealed-memory 2MiB: is more than the memory for the tensors"),
        ("--body-limit 1KiB --head-limit 2KiB", "--head-limit 2KiB: is more than the whole body (--body-limit), 1"),
        ("--sealed-case-s 9 --sealed-check-s 8", "--sealed-case-s 9: is more than a whole check may take"),
    ],
)  # fmt: skip
def test_a_refusal_has_flag_value_and_rule(flags: str, line: str) -> None:
    """A setting that can't be is named with its value and the rule in our words, unless it is a secret."""
    (said,) = refused(*flags.split())
    assert said.startswith(line)


def test_all_broken_settings_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong values, contradictions, files and former names are listed in one run, each by its flag or variable."""
    monkeypatch.setenv("CONVGRAD_DRAIN_S", "fast")
    monkeypatch.setenv("convgrad_queue_length", "0")
    monkeypatch.setenv("CONVGRAD_CHECK_CASES", "9")
    flags = [
        "--port",
        "x",
        "--keys-file",
        "/nowhere",
        "--memory-limit",
        "1EB",
        "--host",
        "0.0.0.0",
        "--output-limit",
        "",
    ]
    names = [line.partition(":")[0] for line in refused(*flags)]
    assert names == [
        *("--port x", "--keys-file /nowhere", "convgrad_queue_length=0", "--output-limit ''", "--memory-limit 1EB"),
        *("CONVGRAD_DRAIN_S=fast", "CONVGRAD_CHECK_CASES has been renamed"),
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--check"], "--check has been renamed: it is --dry-run now"),
        (["--checks=9"], "--checks has been renamed: it is --sealed-checks now"),
        (["--check_case_s", "9"], "--check_case_s has been renamed: it is --sealed-case-s now"),
        (["--wokers", "2"], "--wokers is not a flag of convgrad serve; did you mean --workers?"),
        (["--queue_length=2"], "--queue_length is not a flag of convgrad serve; did you mean --queue-length?"),
        (["--no-such-thing-at-all"], "--no-such-thing-at-all is not a flag of convgrad serve (convgrad serve --help"),
        (["--port"], "argument --port: expected one argument (convgrad serve --help"),
    ],
)
def test_misspelt_and_former_flags(flags: list[str], said: str) -> None:
    """A flag that does not exist is answered with the one that was meant, without the usage."""
    with pytest.raises(UsageError) as caught:
        parse_flags(flags)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_unwise_settings_are_warned_of() -> None:
    """More workers than processors, nearly all memory, and what has no effect start with a warning each."""
    most = memory_bytes() - 1
    flags = ["--workers", "500", "--memory-limit", str(most), "--ray-workers", "2", "--key-calls", "65"]
    found = [line for line in warnings(read_settings(parse_flags(flags)[0])) if "is not a setting" not in line]
    assert [line.split(" ")[0] for line in found] == ["500", "tensors", "a", "--ray-workers:"]
    assert not list(warnings(read_settings({})))


def test_no_default_contradicts_a_small_machine() -> None:
    """With less memory for tensors than the default limit of an output, only an explicit limit is refused."""
    small = ["prlimit", f"--as={1 << 30}", sys.executable, "-m", "app", "--dry-run"]
    environment = {**os.environ, NAME: "reference"}
    done = subprocess.run(small, check=False, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "512.0 MiB for tensors, of 1.0 GiB" in done.stdout
    given = [*small, "--output-limit", "1GiB"]
    done = subprocess.run(given, check=False, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stderr.startswith("--output-limit 1GiB: is more than the memory for the tensors of all calls")
