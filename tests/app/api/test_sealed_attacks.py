"""Attacks on sealed checks over HTTP: other answers, answers at odd moments, checks that hold places, signatures."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import convgrad
from app.calls.sealed.checks import SealedChecks, SealedLimits, submit
from app.pool.buffers import SegmentPool
from convgrad import Overloaded
from convgrad._cli import main
from engine.sealed.checks import SealedCase
from tests.app.api import cheats
from tests.app.bare import connected, written
from tests.app.pool.fleet import Frozen
from tests.app.resident import Resident, resident_service
from tests.app.samples import digest

TAKES = {"ops": ["BiasAdd"], "data_formats": ["NCX"], "dtypes": ["f32"]}


CHEATS = Path(cheats.__file__)
KEY = "cg_the-key-of-the-checker"


@pytest.fixture(scope="module")
def resident() -> Iterator[Resident]:
    """A service with a key and one worker, beside the spare one."""
    with resident_service(workers=1, keys=f"checker {digest(KEY)}") as resident:
        resident.service.sealed_checks = SealedChecks(None, resident.service.segments, SealedLimits(checks=8))
        yield resident


@pytest.fixture
def client(resident: Resident) -> Iterator[convgrad.Client]:
    """The Python client."""
    with convgrad.Client(resident.url, api_key=KEY) as client:
        yield client


def given(resident: Resident, check: str) -> SealedCase:
    """Return the service's own record of the case that was given last."""
    return resident.service.sealed_checks._checks[check].cases[-1]


def right(case: convgrad.SealedCase) -> np.ndarray[Any, Any]:
    """Return the right result of BiasAdd."""
    src, bias = case.inputs["src"], case.inputs["bias"]
    found: np.ndarray[Any, Any] = src + bias.reshape(-1, *[1] * (src.ndim - 2))
    return found


def next_case(client: convgrad.Client, check: str) -> convgrad.SealedCase:
    """Return the next case, which there is."""
    case = client.next_case(check)
    assert case is not None
    return case


@contextmanager
def submitted(resident: Resident, check: str, result: np.ndarray[Any, Any]) -> Iterator[None]:
    """Submit a result and hang up while it is judged, which takes as long as the block."""
    with Frozen({worker["pid"] for worker in resident.service.engine.snapshot()["workers"]}):
        body = {"case": 0, "inputs": {"dst": {"dtype": "f32", "shape": list(result.shape), "data": result.tolist()}}}
        headers = {"x-api-key": KEY}
        request = httpx.Request("POST", f"{resident.url}/v1/checks/{check}/submit", json=body, headers=headers)
        with connected(resident.url) as sock:
            sock.sendall(b"".join(written(request)))
            resident.until(lambda: given(resident, check).status == "judging")
        resident.until(lambda: not resident.service.admission.requests)
        yield


def test_hanging_up_before_the_verdict(resident: Resident, client: convgrad.Client) -> None:
    """A wrong result counts although its sender hung up while it was judged; no other answer is taken."""
    check = client.begin_check(TAKES, cases=1)
    case = next_case(client, check)
    wrong = np.zeros(case.output_shape, np.float32)
    with submitted(resident, check, wrong):
        assert given(resident, check).status == "judging"
        with pytest.raises(convgrad.InvalidParams, match="has been answered"):
            client.submit_result(case, right(case))
        with pytest.raises(convgrad.InvalidParams, match="has been answered"):
            client.submit_outcome(case, "unsupported")
    assert not client.submit_result(case, wrong).passed  # it is judged once: this waits for the verdict
    document = client.finish_check(check)
    assert document["counts"] == {"not_given": 0, "failed": 1}
    assert document["verdict"] == "failed"


def test_the_verdict_is_waited_for(resident: Resident, client: convgrad.Client) -> None:
    """A right result whose sender was disconnected counts as well: a check is finished after the last verdict."""
    check = client.begin_check(TAKES, cases=1)
    with submitted(resident, check, right(next_case(client, check))):
        pass
    assert client.finish_check(check)["counts"] == {"not_given": 0, "passed": 1}


def test_an_answer_that_could_not_be_judged(resident: Resident, client: convgrad.Client) -> None:
    """After a failure of the service the same answer is taken again, and no other."""
    check = client.begin_check(TAKES, cases=1)
    case = next_case(client, check)
    own = given(resident, check)

    async def fail() -> None:
        async def judge() -> dict[str, Any]:
            raise Overloaded("as when the queue is full")

        with pytest.raises(Overloaded):
            await submit(own, result_sha256(right(case)), judge)

    resident.run(fail())
    assert own.status == "open"
    with pytest.raises(convgrad.InvalidParams, match="has been answered"):
        client.submit_result(case, np.zeros(case.output_shape, np.float32))
    assert client.submit_result(case, right(case)).passed
    assert client.finish_check(check)["passed"]


def result_sha256(result: np.ndarray[Any, Any]) -> str:
    """Return the checksum of a result as the document has it."""
    return hashlib.sha256(result.tobytes()).hexdigest()


def test_declined_cases(client: convgrad.Client) -> None:
    """A kernel that declines a case has not passed; the document says which cases it declined."""
    check = client.begin_check(TAKES, cases=3)
    while (case := client.next_case(check)) is not None:
        if case.number == 1:
            client.submit_outcome(case, "unsupported")
        else:
            assert client.submit_result(case, right(case)).passed
    document = client.finish_check(check)
    assert (document["verdict"], document["passed"]) == ("incomplete", False)
    assert document["counts"] == {"not_given": 0, "passed": 2, "unsupported": 1}
    assert [entry["status"] for entry in document["cases"]] == ["passed", "unsupported", "passed"]


async def test_finished_checks_hold_no_place() -> None:
    """However many checks were finished, new ones begin; the latest documents are kept, of each owner and of all."""
    checks = SealedChecks(None, SegmentPool(1 << 20), SealedLimits(checks=2))
    finished = []
    for number in range(300):
        finished.append(checks.begin({}, f"owner {number // 3}", "key"))
        checks.finish(finished[-1])
    kept = [index for index, check in enumerate(finished) if check.id in checks._checks]
    assert kept == [number for number in range(300) if number % 3]  # two of each owner
    for number in range(100):
        for _ in range(2):
            checks.finish(checks.begin({}, f"another owner {number}", "key"))
    assert len(checks._checks) == 256


def test_signed_documents_have_no_other_members(resident: Resident, client: convgrad.Client, tmp_path: Path) -> None:
    """A document is valid with the members that were signed, and none beside them, in `signature` or below."""
    document = client.finish_check(client.begin_check(TAKES, cases=1, label="mine"))
    signature = document["signature"]
    assert client.verify_signature(document)["valid"]
    added = [
        {**document, "signature": {**signature, "verdict": "passed"}},
        {**document, "signature": {**signature, "data": "A" * 100_000}},
        {**document, "signature": {**signature, "value": signature["value"].upper()}},
        {**document, "counts": {**document["counts"], "passed": 1}},
        {**document, "takes": {**document["takes"], "more": []}},
        {**document, "cases": [{"case": 0}]},
        {**document, "asked": 1.0},
        {**document, "asked": True},
    ]
    assert [client.verify_signature(each)["reason"] for each in added] == ["changed"] * len(added)
    path = tmp_path / "twice.json"
    path.write_text('{"passed": true, ' + json.dumps(document)[1:], encoding="utf-8")
    assert main(["check", "--verify-signature", str(path), "--url", resident.url, "--api-key", KEY]) == 2


def run(resident: Resident, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command below a shell that has the key in its environment, and the address in its arguments."""
    script = f"{shlex.join(command)}; status=$?; : {resident.url}; exit $status"
    environment = {**os.environ, "CONVGRAD_API_KEY": KEY}
    return subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="processes are isolated on Linux only")
def test_the_service_does_not_compute_the_answers(resident: Resident) -> None:
    """A kernel that borrows the checker's key has right results, but not in a sealed check."""
    found = run(resident, ["env", "-u", "CONVGRAD_API_KEY", sys.executable, str(CHEATS)])
    assert found.returncode == 0, found.stderr
    sealed = ["--sealed", resident.url, "--cases", "3", "--takes", "data_formats=NCX", "--ops", "BiasAdd"]
    command = [sys.executable, "-m", "convgrad", "check"]
    checked = run(resident, [*command, f"{CHEATS}:borrowed", *sealed])
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "could not use the network or local sockets, or read other processes, or write outside" in checked.stdout
    assert "COULD" not in checked.stdout
    checked = run(resident, [*command, f"{CHEATS}:honest", *sealed])
    assert checked.returncode == 0, checked.stderr
