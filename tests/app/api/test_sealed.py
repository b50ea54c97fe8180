"""Sealed checks on every API: the service draws the cases, judges, and signs. Cheating kernels don't pass."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

import convgrad
from app.calls.sealed.tasks import check_task
from app.telemetry.context import RequestContext
from convgrad import SealedCase
from convgrad._check.problems import DTYPES, OPS, Takes
from convgrad._cli import main
from schemas.checks import CHECK_METHODS
from tests.app.resident import Resident, resident_service
from tests.app.samples import digest, messages
from tests.convgrad.check.checking import KERNELS

Array = npt.NDArray[Any]
Kernel = Callable[[SealedCase, list[Array]], Array]

WEIGHTS = {"ops": ["ConvolutionBackwardWeights"], "dtypes": ["f32"]}


KEYS = {"one": "cg_first-of-two-keys", "two": "cg_second-of-two-keys"}


@pytest.fixture(scope="module")
def resident() -> Iterator[Resident]:
    """A service with two keys; that of all tests would have the open checks of others."""
    keys = ";".join(f"{name} {digest(key)}" for name, key in KEYS.items())
    with resident_service(workers=1, keys=keys) as resident:
        yield resident


@pytest.fixture(scope="module")
def http(resident: Resident) -> Iterator[httpx.Client]:
    """An HTTP client with the first key."""
    with httpx.Client(base_url=resident.url, headers={"x-api-key": KEYS["one"]}, timeout=60) as client:
        yield client


@pytest.fixture
def other(resident: Resident) -> Iterator[httpx.Client]:
    """An HTTP client with the second key."""
    with httpx.Client(base_url=resident.url, headers={"x-api-key": KEYS["two"]}, timeout=60) as client:
        yield client


@pytest.fixture
def client(resident: Resident) -> Iterator[convgrad.Client]:
    """The Python client with the first key; at the end no check is open."""
    with convgrad.Client(resident.url, api_key=KEYS["one"]) as client:
        yield client


@pytest.fixture
def check(client: convgrad.Client) -> Iterator[str]:
    """A check of three cases."""
    check = client.begin_check(WEIGHTS, cases=3)
    yield check
    client.drop_check(check)


@pytest.fixture(autouse=True)
def no_checks(resident: Resident) -> Iterator[None]:
    """Drop the checks that a test leaves open, and see that nothing is left in memory."""
    yield
    checks, segments = resident.service.sealed_checks, resident.service.segments

    async def drop() -> None:
        for check in list(checks._checks.values()):
            checks.drop(check)

    resident.run(drop())
    resident.until(lambda: segments.stats().used == 0)


def right(client: convgrad.Client, case: SealedCase) -> Array:
    """Return the right result of a case."""
    return client.run(case.op, case.inputs, case.attributes, reference=case.dtype == "f64")


def kinds(reply: httpx.Response) -> list[str]:
    """Return the names of the rules that a request broke."""
    assert reply.status_code == 422, reply.text
    return [error["type"] for error in reply.json()["errors"]]


def rpc(http: httpx.Client, *calls: tuple[str, dict[str, Any]], **members: Any) -> httpx.Response:
    """Send JSON-RPC requests, as a batch if there are several."""
    batch = [{"jsonrpc": "2.0", "method": f"check.{name}", "params": params, **members} for name, params in calls]
    return http.post("/rpc", json=batch if len(batch) > 1 else batch[0])


def test_a_constant_never_passes_a_check(resident: Resident, http: httpx.Client) -> None:
    """Where the right result of every case is zero, zeros pass the cases and not the check."""
    check = http.post("/v1/checks", json={"takes": WEIGHTS, "cases": 1}).json()["check"]
    case = http.post(f"/v1/checks/{check}/next").json()
    for segment in resident.service.sealed_checks._checks[check].cases[0].inputs.values():
        segment.view[:] = bytes(segment.size)
    zeros = {name: {**tensor, "data": zeros_of(tensor)} for name, tensor in case["outputs"].items()}
    report = http.post(f"/v1/checks/{check}/submit", json={"case": 0, "inputs": zeros}).json()
    document = http.post(f"/v1/checks/{check}/finish").json()
    assert report["passed"]
    assert document["counts"]["passed"] == 1
    assert not document["passed"]


def zeros_of(tensor: dict[str, Any]) -> str:
    """Return the base64 of zeros."""
    return base64.b64encode(bytes(4 * int(np.prod(tensor["shape"])))).decode()


def test_a_case_shows_neither_seed_nor_reference(http: httpx.Client, check: str) -> None:
    """The reply with a case has its call alone; the seed is in the document, when the case is over."""
    reply = http.post(f"/v1/checks/{check}/next")
    assert set(reply.json()) == {
        "check", "case", "cases", "op", "dtype", "attributes", "problem", "outputs", "inputs",
    }  # fmt: skip
    assert [set(tensor) for tensor in reply.json()["outputs"].values()] == [{"dtype", "shape"}]
    document = http.post(f"/v1/checks/{check}/finish").json()
    (entry,) = document["cases"]
    assert entry["seed"] not in reply.text
    assert str(int(entry["seed"], 16)) not in reply.text
    assert document["counts"] == {"not_given": 2, "unanswered": 1}
    assert not document["passed"]


def test_results_that_are_refused(http: httpx.Client, check: str, client: convgrad.Client) -> None:
    """Results for cases that were not given, second ones, and those after the end are refused, each by name."""
    path = f"/v1/checks/{check}/submit"
    outcome = {"case": 0, "outcome": "failed"}
    assert kinds(http.post(path, json=outcome)) == ["not_given"]
    case = client.next_case(check)
    assert case is not None
    assert kinds(http.post(path, json={**outcome, "case": 1})) == ["not_given"]
    assert kinds(http.post(path, json={**outcome, "outcome": "passed"})) == ["choice"]
    assert kinds(http.post(path, json={"case": 0})) == ["missing"]
    assert kinds(
        http.post(path, json={"case": 0, "inputs": {"src": {"dtype": "f32", "shape": [1], "data": [1.0]}}})
    ) == ["unknown_input"]
    with pytest.raises(convgrad.InvalidParams, match="must have shape"):
        client.submit_result(case, np.zeros(3, np.float32))
    assert client.submit_result(case, right(client, case)).passed
    assert client.next_case(check) is not None
    assert kinds(http.post(path, json=outcome)) == ["answered"]
    with pytest.raises(convgrad.InvalidParams, match="has been answered"):
        client.submit_result(case, right(client, case))
    document = client.finish_check(check)
    assert document["counts"] == {"not_given": 1, "passed": 1, "unanswered": 1}
    assert not document["passed"]
    assert kinds(http.post(path, json={**outcome, "case": 1})) == ["finished"]
    assert kinds(http.post(f"/v1/checks/{check}/next")) == ["finished"]


def test_an_outcome_may_be_repeated(http: httpx.Client, check: str, client: convgrad.Client) -> None:
    """A client that did not get the reply sends its outcome again and gets the same one; another answer is refused."""
    client.next_case(check)
    path, outcome = f"/v1/checks/{check}/submit", {"case": 0, "outcome": "unsupported"}
    assert http.post(path, json=outcome).json() == http.post(path, json=outcome).json() == {"check": check, **outcome}
    assert kinds(http.post(path, json=outcome | {"outcome": "failed"})) == ["answered"]
    assert client.finish_check(check)["counts"] == {"not_given": 2, "unsupported": 1}


def test_a_result_without_its_bytes(http: httpx.Client, check: str, client: convgrad.Client) -> None:
    """A file that ends after its header leaves whatever is in memory: it is refused, and the case stays open."""
    case = client.next_case(check)
    assert case is not None
    file = io.BytesIO()
    np.save(file, right(client, case))
    header = file.getvalue()[:128]
    parts = [
        ("request", ("request", b'{"case": 0}', "application/json")),
        ("diff_weights", ("w.npy", header, "any/any")),
    ]
    reply = http.post(f"/v1/checks/{check}/submit", files=parts)
    assert reply.status_code in (400, 422), reply.text
    whole = httpx.Request("POST", "http://any", files=parts)
    pieces = iter([whole.read()[:-250], whole.read()[-250:]])  # the request object, and later the file
    headers = {"content-type": whole.headers["content-type"]}
    reply = http.post(f"/v1/checks/{check}/submit", content=pieces, headers=headers)
    assert reply.status_code in (400, 422), reply.text
    described = {"dtype": "f32", "shape": list(case.output_shape), "data": ""}
    reply = http.post(f"/v1/checks/{check}/submit", json={"case": 0, "inputs": {"diff_weights": described}})
    assert kinds(reply) == ["size"]
    assert client.submit_result(case, right(client, case)).passed


@pytest.mark.parametrize("encoding", ["base64", "npy", "list"])
def test_json_rpc(http: httpx.Client, encoding: str) -> None:
    """A whole check by JSON-RPC, with the inputs in each encoding; a repeated result counts once."""

    def call(method: str, **params: Any) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        reply = http.post("/rpc", json=body).json()
        return reply.get("result", reply.get("error"))

    check = call("check.begin", takes=WEIGHTS, cases=1)["check"]
    case = call("check.next", check=check, encoding=encoding)
    inputs = {name: {k: v for k, v in tensor.items() if k != "shape" or "npy" not in tensor}
              for name, tensor in case["inputs"].items()}  # fmt: skip
    computed = call(case["op"], attributes=case["attributes"], inputs=inputs)["outputs"]
    params = {"check": check, "case": case["case"], "inputs": computed}
    other = {"check": check, "case": case["case"], "outcome": "failed"}
    first, again, refused = rpc(http, ("submit", params), ("submit", params), ("submit", other), id=1).json()
    assert first == again
    error = refused["error"]
    assert error["code"] == -32602
    assert error["data"]["errors"][0]["type"] == "answered"
    assert call("check.next", check=check) == {"check": check, "case": None, "cases": 1}
    document = call("check.finish", check=check)
    assert document["counts"]["passed"] == 1
    assert call("check.verify_signature", document=document)["valid"]
    assert call("check.drop", check=check) == call("check.drop", check=check) == {"check": check}
    assert call("check.finish", check=check)["data"]["reason"] == "unknown_check"


@pytest.mark.parametrize("name", ["0" * 31, "x" * 32, "G" * 32])
def test_only_a_check_can_be_dropped(http: httpx.Client, name: str) -> None:
    """A check that is gone may be dropped again, but no name that no check has."""
    assert http.delete(f"/v1/checks/{name}").status_code == 404


def test_another_key(http: httpx.Client, other: httpx.Client) -> None:
    """A check is for the key that began it; the other key is refused by name on every page."""
    check = http.post("/v1/checks", json={"takes": WEIGHTS}).json()["check"]
    http.post(f"/v1/checks/{check}/next")
    submitted = {"case": 0, "outcome": "failed"}
    replies = [
        other.post(f"/v1/checks/{check}/{page}", json=body)
        for page, body in (("next", {}), ("finish", {}), ("submit", submitted))
    ]
    replies.append(other.delete(f"/v1/checks/{check}"))
    assert [(reply.status_code, reply.json()["reason"]) for reply in replies] == [(403, "other_key")] * 4
    assert http.post(f"/v1/checks/{check}/submit", json=submitted).status_code == 200
    assert http.post(f"/v1/checks/{check}/finish").json()["key"] == "one"


def test_a_late_result(resident: Resident, http: httpx.Client) -> None:
    """After its time a case takes no result, its memory is free, and the next one is given."""
    check = http.post("/v1/checks", json={"takes": WEIGHTS, "cases": 2}).json()["check"]
    http.post(f"/v1/checks/{check}/next")
    (case,) = resident.service.sealed_checks._checks[check].cases
    case.until = 0.0
    assert kinds(http.post(f"/v1/checks/{check}/submit", json={"case": 0, "outcome": "failed"})) == ["late"]
    assert not case.inputs
    assert http.post(f"/v1/checks/{check}/next").json()["case"] == 1
    document = http.post(f"/v1/checks/{check}/finish").json()
    assert document["counts"] == {"not_given": 0, "late": 1, "unanswered": 1}


def test_an_answer_while_the_inputs_are_sent(resident: Resident, http: httpx.Client) -> None:
    """An answer is taken as soon as its case was drawn: the client may have the inputs before the service knows it."""
    check = http.post("/v1/checks", json={"takes": WEIGHTS, "cases": 1}).json()["check"]
    work = resident.run(begin_to_send(resident, check))
    submitted = {"case": 0, "outcome": "failed"}
    assert http.post(f"/v1/checks/{check}/submit", json=submitted).json() == {"check": check, **submitted}
    resident.run(work.__aexit__(None, None, None))


async def begin_to_send(resident: Resident, check: str) -> Any:
    """Prepare the reply with a case of the first key, and send none of it."""
    task = check_task(resident.service, RequestContext("test", key="one"), "check.next")
    work = await task.prepare(await task.read({"check": check}))
    return await work.__aenter__()


def test_limits(http: httpx.Client, other: httpx.Client) -> None:
    """A key may have a number of checks open, beside those of other keys; as many finished ones are kept."""
    checks = [http.post("/v1/checks").json()["check"] for _ in range(4)]
    refused = http.post("/v1/checks")
    assert (refused.status_code, refused.json()["reason"], refused.json()["limit"]) == (429, "checks", 4)
    assert other.post("/v1/checks").status_code == 200
    http.post(f"/v1/checks/{checks[0]}/finish")
    checks.append(http.post("/v1/checks").json()["check"])
    assert http.post(f"/v1/checks/{checks[0]}/finish").status_code == 200
    assert [http.delete(f"/v1/checks/{check}").status_code for check in checks] == [200] * 5


WRONG: list[Any] = [{"ops": ["Conv"]}, {"strides": 1}, {"dtypes": {"f32": 1}}, {"stride": True}, []]
BEGINNINGS: list[dict[str, Any]] = [
    *({"takes": {"ranks": ranks}} for ranks in ([2.0], [True], [], [[2]])),
    *({"takes": takes} for takes in WRONG),
    {"takes": {"ops": ["BiasAddBackward"], "ranks": [1]}},
    *({"cases": cases} for cases in (0, 201, True)),
    *({"label": label} for label in ("\n", "x" * 201)),
    {"seed": 1},
    {"casez": 2},
]


@pytest.mark.parametrize("given", BEGINNINGS, ids=str)
def test_beginnings_that_are_refused(http: httpx.Client, given: dict[str, Any]) -> None:
    """A check begins with valid members only; the error has its place."""
    reply = http.post("/v1/checks", json=given)
    assert kinds(reply)
    assert set(reply.json()["errors"][0]["loc"]) & {*given, "seed"}


def test_the_documented_members() -> None:
    """The API documents have the members and values of `Takes`."""
    documented = CHECK_METHODS["check.begin"].params["takes"]["properties"]
    assert documented.keys() == Takes.__dataclass_fields__.keys()
    values = {name: schema["items"]["enum"] for name, schema in documented.items() if "items" in schema}
    assert set(OPS) <= set(values.pop("ops"))
    assert values.pop("dtypes") == list(DTYPES)
    assert values == {name: list(getattr(Takes(), name)) for name in values}


@pytest.mark.parametrize("address", [True, False])
def test_the_command(
    resident: Resident,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    address: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`convgrad check --sealed` passes a right kernel and writes what --verify-signature verifies; cheats fail.

    Without an address it is a self-test, which the service's key did not sign.
    """
    monkeypatch.delenv("CONVGRAD_URL", raising=False)
    path, cheats = tmp_path / "check.json", tmp_path / "cheats of Ångström.py"
    cheats.write_text(Path(__file__).with_name("cheats.py").read_text(encoding="utf-8"), encoding="utf-8")
    where = ["--sealed", resident.url, "--api-key", KEYS["one"]] if address else ["--sealed"]
    flags = ["--cases", "4", "--report", str(path), *where]
    assert main(["check", f"{KERNELS}:right", *flags]) == 0
    assert "passed; 4 of 4 cases passed" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["digest"] == f"sha256:{hashlib.sha256(KERNELS.read_bytes()).hexdigest()}"
    verify = ["check", "--verify-signature", str(path)]
    assert main(verify) == 0
    assert f"public key {document['signature']['public_key']}: compare it" in capsys.readouterr().out
    with convgrad.Client(resident.url, api_key=KEYS["one"]) as client:
        (tmp_path / "key.json").write_text(json.dumps(client.check_key()))
    assert main([*verify, "--public-key", str(tmp_path / "key.json")]) == (not address)
    path.write_text(json.dumps({**document, "label": "another"}))
    assert main(verify) == 1
    assert "NOT valid: the document was changed" in capsys.readouterr().out
    assert main(["check", *flags, f"{cheats}:honest"]) == 0
    assert ("a self-test: its signature is worth nothing to others" in capsys.readouterr().out) != address
    for cheat in ("untouched", "patched", "early", "changed"):
        assert main(["check", f"{cheats}:{cheat}", *flags]) == 1
        assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 2])
def test_notifications_take_effect(http: httpx.Client, client: convgrad.Client, count: int) -> None:
    """A check is dropped by a notification; an unknown check has a code of its own, and no reply."""
    check = client.begin_check(WEIGHTS)
    response = rpc(http, *[("drop", {"check": check})] * count)
    assert (response.status_code, response.content) == (204, b"")
    error = rpc(http, ("finish", {"check": check}), id=1).json()["error"]
    assert (error["code"], error["data"]["code"]) == (-32008, "not_found")


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_batch_takes_effect_in_order(http: httpx.Client, check: str, accept: str) -> None:
    """The requests of a batch about a check run in their order, notifications included."""
    asked = [("next", 1), ("submit", None), ("next", 2), ("finish", 3), ("next", 4)]
    params: dict[str, Any] = {"submit": {"check": check, "case": 0, "outcome": "unsupported"}}
    batch = [
        {"jsonrpc": "2.0", "method": f"check.{name}", "params": params.get(name, {"check": check})}
        | ({} if number is None else {"id": number})
        for name, number in asked
    ]
    response = http.post("/rpc", json=batch, headers={"accept": accept})
    found = response.json() if accept == "application/json" else messages(response.text)
    first, second, document, late = found
    assert (first["result"]["case"], second["result"]["case"]) == (0, 1)
    assert document["result"]["counts"] == {"not_given": 1, "unsupported": 1, "unanswered": 1}
    assert late["error"]["data"]["errors"][0]["type"] == "finished"
