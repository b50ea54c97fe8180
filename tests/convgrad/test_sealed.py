"""Sealed checks by a client: of a service, and in this process as self-tests."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convgrad
from convgrad import Client, SealedCase
from convgrad._check.cases import Case, draw
from convgrad._check.problems import Takes
from engine.process import Engine
from engine.sealed.selftest import SelfTests
from engine.sealed.signing import Signer
from engine.threads import Stop
from tests.live import LiveService

Array = npt.NDArray[Any]
WEIGHTS = {"ops": ["ConvolutionBackwardWeights"], "dtypes": ["f32"]}
DIGEST = "sha256:" + "5a" * 32
BIAS = {"ops": ["BiasAdd"], "dtypes": ["f32"], "ranks": [2], "data_formats": ["NCX"], "empty": False}


@pytest.fixture
def check(live: Client) -> Iterator[str]:
    """A check of two cases."""
    check = live.begin_check(BIAS, cases=2)
    yield check
    live.drop_check(check)


def right(client: Client, case: SealedCase) -> Array:
    """Return the right result of a case."""
    return client.run(case.op, case.inputs, case.attributes, reference=case.dtype == "f64")


def next_case(client: Client, check: str) -> SealedCase:
    """Return the next case, which there is."""
    case = client.next_case(check)
    assert case is not None
    return case


@pytest.mark.parametrize("seed", [False, True])
def test_an_honest_kernel_passes(live: Client, seed: bool) -> None:
    """Right results of all operations and dtypes pass; the document counts them, and its seeds draw the cases again."""
    takes = {
        "ops": ["Convolution", "BiasAddBackward", "ConvTransposeBackpropFilters"],
        "dtypes": ["f32", "bf16", "f64"],
    }
    check = live.begin_check(takes, cases=12, label="mine, commit 1234", digest=DIGEST)
    drawn = []
    while (case := live.next_case(check, seed=seed)) is not None:
        again = live.next_case(check)
        assert again is not None
        assert {name: array.tobytes() for name, array in again.inputs.items()} == {
            name: array.tobytes() for name, array in case.inputs.items()
        }
        drawn.append(case)
        assert live.submit_result(case, right(live, case)).passed
    document = live.finish_check(check)
    assert document["passed"]
    assert document["counts"] == {"not_given": 0, "passed": 12}
    assert (document["label"], document["digest"], document["asked"]) == ("mine, commit 1234", DIGEST, 12)
    assert document["key"] == ("(self-test)" if isinstance(live, convgrad.LocalClient) else "-")
    assert live.finish_check(check) == document
    assert live.verify_signature(document)["valid"]
    repeats = [entry["case"] for entry in document["cases"] if "repeats" in entry]
    assert repeats[-2:] == [7, 11]
    assert set(repeats) <= {3, 7, 11}  # none of the first three cases may have data to vary
    problems = list[Case]()
    for case, entry in zip(drawn, document["cases"], strict=True):
        assert entry["sent"] == ("seed" if seed else "tensors")
        seed_of, number = int(entry["seed"], 16), entry["case"]
        same = draw(seed_of, number, Takes(**document["takes"]))
        if "repeats" in entry:
            same = replace(problems[entry["repeats"]], kind="integers", seed=seed_of, number=number)
        problems.append(same)
        assert same.problem.as_json() == case.problem
        assert all(array.tobytes() == case.inputs[name].tobytes() for name, array in same.inputs().items())


def test_signatures(live: Client, check: str) -> None:
    """A document is valid where it was signed; if not, it was changed, or signed with another key."""
    document = live.finish_check(check)
    changed = {**document, "passed": True}
    other = Signer().signed(document)
    unsigned = {name: value for name, value in document.items() if name != "signature"}
    found = [live.verify_signature(each) for each in (document, changed, other, unsigned)]
    assert [each["valid"] for each in found] == [True, False, False, False]
    assert [each["reason"] for each in found] == [None, "changed", "other_key", "not_signed"]
    assert live.check_key() == {name: document["signature"][name] for name in ("algorithm", "key_id", "public_key")}


def test_a_self_test_is_no_word_of_a_service(service: LiveService) -> None:
    """A service did not sign the document of a self-test, nor this process that of a service; the process did."""
    with Client(service.url) as remote, convgrad.local() as local:
        mine, theirs = (each.finish_check(each.begin_check(BIAS)) for each in (local, remote))
        found = [remote.verify_signature(mine), local.verify_signature(theirs)]
    assert [each["reason"] for each in found] == ["other_key"] * 2
    assert convgrad.local().verify_signature(mine)["valid"]


def test_an_answer_is_the_only_one(live: Client, check: str) -> None:
    """The same answer has the same report, and no other is taken; a case that was left is unanswered."""
    case = next_case(live, check)
    assert next_case(live, check).number == 0
    report = live.submit_result(case, right(live, case))
    assert live.submit_result(case, right(live, case)).data == report.data
    with pytest.raises(convgrad.InvalidParams, match="has been answered"):
        live.submit_result(case, right(live, case) + 1)
    assert next_case(live, check).number == 1
    with pytest.raises(convgrad.InvalidParams, match="has been answered"):
        live.submit_result(case, right(live, case))
    document = live.finish_check(check)
    assert document["counts"] == {"not_given": 0, "passed": 1, "unanswered": 1}
    assert document["verdict"] == "failed"


def test_what_the_kernel_changes_is_not_judged(live: Client, check: str) -> None:
    """A kernel that overwrites its inputs with zeros is judged by what they were."""
    case = next_case(live, check)
    for array in case.inputs.values():
        array.fill(0)
    assert not live.submit_result(case, np.full(case.output_shape, np.float32(0.5))).passed


def refusals(client: Client) -> Iterator[Callable[[], object]]:
    """Yield calls that are refused, of a check that ends meanwhile."""
    yield from [
        lambda: client.begin_check({"ops": ["Conv"]}),
        lambda: client.begin_check({"ranks": [2.0]}),
        lambda: client.begin_check({"stride": True, "bias": 1}, cases=0, label="\n", digest="md5:0"),
        lambda: client.begin_check([1]),  # type: ignore[arg-type]
        lambda: client.begin_check(cases=201),
        lambda: client.next_case("0" * 32),
        lambda: client.next_case("A/"),
        lambda: client.finish_check(1),  # type: ignore[arg-type]
        lambda: client.drop_check("0" * 31),
        lambda: client.verify_signature([]),  # type: ignore[arg-type]
        lambda: client.verify_signature({"passed": {1}}),
    ]
    check = client.begin_check(BIAS, cases=2)
    case, one = next_case(client, check), np.ones(1, np.float32)
    yield from [
        lambda: client.submit_result(replace(case, number=1), one),
        lambda: client.submit_result(replace(case, number=True), one),
        lambda: client.submit_result(replace(case, check="0" * 32), one),
        lambda: client.submit_result(case, one),
        lambda: client.submit_result(case, np.ones(case.output_shape, np.float64)),
        lambda: client.submit_result(case, np.ones(case.output_shape, np.int16)),
        lambda: client.submit_outcome(case, "passed"),
    ]
    client.submit_outcome(case, "failed")
    yield lambda: client.submit_outcome(case, "unsupported")
    yield lambda: client.submit_result(case, np.ones(case.output_shape, np.float32))
    client.finish_check(check)
    yield from [lambda: client.next_case(check), lambda: client.submit_outcome(case, "failed")]


def test_a_self_test_refuses_in_the_words_of_a_service(service: LiveService) -> None:
    """Errors have the same class, message and broken rules, but for the sizes of the case."""

    def raised(call: Callable[[], object]) -> tuple[type, str]:
        with pytest.raises(convgrad.ConvgradError) as caught:
            call()
        data = {name: value for name, value in caught.value.data.items() if name not in ("instance", "request_id")}
        return type(caught.value), re.sub(r"\d+", "0", f"{caught.value.message} {data}")

    with Client(service.url) as remote:
        for mine, theirs in zip(refusals(convgrad.local()), refusals(remote), strict=True):
            assert raised(mine) == raised(theirs)


def test_an_answer_that_could_not_be_judged() -> None:
    """After an interrupted judgement the same answer is taken again, and no other."""
    engine, checks, go, stop = Engine(), SelfTests(), Stop(None), Stop(None)
    stop.set()
    given = {"check": checks.answer(engine, "check.begin", {"takes": BIAS, "cases": 1}, go)["check"]}
    case = checks.answer(engine, "check.next", {**given, "send": "tensors"}, go)
    ((name, described),) = case["outputs"].items()
    wrong = np.full(described["shape"], np.float32(0.5))
    answer = {**given, "case": 0, "inputs": {name: wrong}}
    with pytest.raises(convgrad.Cancelled):
        checks.answer(engine, "check.submit", answer, stop)
    with pytest.raises(convgrad.InvalidParams, match="has been answered"):
        checks.answer(engine, "check.submit", {**answer, "inputs": {name: wrong + 1}}, go)
    assert not checks.answer(engine, "check.submit", answer, go)["passed"]
    (entry,) = checks.answer(engine, "check.finish", given, go)["cases"]
    assert (entry["status"], entry["result_sha256"]) == ("failed", hashlib.sha256(wrong.tobytes()).hexdigest())


def test_a_fork_while_another_thread_judges() -> None:
    """The child of a process whose other thread has the checks begins checks of its own."""
    checks, engine = SelfTests(), Engine(1)
    with checks._lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            checks.answer(engine, "check.begin", {}, Stop())
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
