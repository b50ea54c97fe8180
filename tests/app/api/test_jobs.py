"""Jobs over HTTP: submitted, computed, fetched in every form, cancelled; refused as the call itself would be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app import graph
from tests.app.resident import Resident, resident_service
from tests.app.samples import (
    FRAMES,
    JSON,
    NPY,
    SMALL,
    SSE,
    digest,
    document,
    doubled,
    messages,
    parts,
    post,
    problem,
    read,
    read_events,
    read_tensor,
    rpc_request,
    same_bits,
    square,
    wait_for,
)

FORM = "multipart/form-data"
ASYNC = {"prefer": "respond-async"}
KEY = "cg_the-only-one-key"
PATH = f"/v1/ops/{SMALL.op}"
SLOW: dict[str, Any] = {"reference": True}
LIMIT = 128 << 20
# Seconds of work for one worker with the reference kernel, in 40 MB.
LASTING = square(16, 128, 128, 40, 20)


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the jobs."""
    return tmp_path_factory.mktemp("spool")


@pytest.fixture(scope="module")
def resident(spool: Path) -> Iterator[Resident]:
    """A service with jobs, and a key that may make one call at a time."""
    keys = f"one {digest(KEY)} calls=1"
    with resident_service(workers=1, keys=keys, spool=spool, spool_key_limit=LIMIT, queue_length=4) as resident:
        yield resident


@pytest.fixture
def http(resident: Resident, spool: Path) -> Iterator[httpx.Client]:
    """An HTTP client with the key; at the end no job, file or memory is left."""
    with httpx.Client(base_url=resident.url, headers={"x-api-key": KEY}, timeout=60) as client:
        yield client
        for _ in range(2):  # those that ran are cancelled first
            for job in client.get("/v1/jobs").json()["jobs"]:
                client.delete(f"/v1/jobs/{job['job']}")
    resident.until(lambda: resident.is_idle() and resident.service.segments.stats().used == 0)
    assert not [*(spool / "requests").iterdir(), *(spool / "results").iterdir()]


def done(http: httpx.Client, reply: httpx.Response) -> str:
    """Wait for the job of a reply; return its path."""
    assert reply.status_code == 202, reply.text
    path = reply.headers["location"]
    wait_for(lambda: http.get(path).json()["state"] not in ("queued", "running"))
    assert http.get(path).json()["state"] == "done", http.get(path).text
    return str(path)


def running(http: httpx.Client) -> str:
    """Submit a job of many seconds and wait until it runs; return its path."""
    reply = post(http, LASTING, LASTING.floats(), headers=ASYNC, **SLOW)
    assert reply.status_code == 202, reply.text
    path = str(reply.headers["location"])
    wait_for(lambda: http.get(path).json().get("progress", {}).get("total", 0) > 0)
    return path


def rpc(http: httpx.Client, name: str, accept: str = JSON, **params: Any) -> httpx.Response:
    """Send a JSON-RPC request."""
    message = {"jsonrpc": "2.0", "id": 1, "method": name, "params": params}
    return http.post("/rpc", json=message, headers={"accept": accept})


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_result_in_every_form(http: httpx.Client, dtype: str) -> None:
    """A call that became a job has the oracle's bits in each format, as often as it is fetched."""
    case = replace(SMALL, dtype=dtype)
    inputs = case.inputs()
    right = case.expected(inputs)
    submitted = post(http, case, inputs, headers=ASYNC)
    assert submitted.headers["preference-applied"] == "respond-async"
    assert submitted.json()["kind"] == "compute"
    path = done(http, submitted)
    for accept in (JSON, NPY, SSE, FRAMES):
        assert same_bits(read(http.get(f"{path}/result", headers={"accept": accept})), right), accept
    form = http.get(f"{path}/result", headers={"accept": FORM})
    assert form.headers["content-type"].startswith(FORM)
    assert right.tobytes() in form.content
    job = submitted.json()["job"]
    (tensor,) = rpc(http, "jobs.result", job=job).json()["result"]["outputs"].values()
    assert same_bits(read_tensor(tensor), right)
    assert same_bits(read_events(rpc(http, "jobs.result", SSE, job=job)), right)
    sync = post(http, case, inputs).json()
    kept = http.get(f"{path}/result").json()
    assert {name: kept[name] for name in kept if name != "stats"} == {
        name: sync[name] for name in sync if name != "stats"
    }
    assert kept["stats"]["kernel"] == sync["stats"]["kernel"]


def test_several_outputs(http: httpx.Client) -> None:
    """Each output is kept; a format that holds one is refused."""
    inputs, names = SMALL.inputs(), ["diff_weights", "diff_bias"]
    path = done(http, post(http, SMALL, inputs, headers=ASYNC, outputs=names, encoding="list"))
    found = http.get(f"{path}/result").json()["outputs"]
    sync = post(http, SMALL, inputs, outputs=names, encoding="list").json()["outputs"]
    assert found == sync
    problem(http.get(f"{path}/result", headers={"accept": NPY}), 406, "not_acceptable")
    problem(http.get(f"{path}/result", headers={"accept": "image/png"}), 406, "not_acceptable")


def test_verifications_tolerances_and_graphs(http: httpx.Client) -> None:
    """What takes minutes can be a job: its result is that of the request itself."""
    inputs = SMALL.inputs()
    checked = document(SMALL, inputs | {"diff_weights": SMALL.expected(inputs)})
    given = graph.tensors(1)
    pages = {f"{PATH}/verify": checked, f"{PATH}/tolerance": document(SMALL, inputs)}
    pages["/v1/graphs"] = graph.body(given, outputs=[2, 6], options={"encoding": "npy"})
    for page, body in pages.items():
        path = done(http, http.post(page, json=body, headers=ASYNC))
        sync, kept = http.post(page, json=body).json(), http.get(f"{path}/result").json()
        for each in (sync, kept):
            each.pop("stats")
            for node in each.get("nodes", ()):
                node.pop("stats")
        assert kept == sync, page
        *_, last = messages(http.get(f"{path}/result", headers={"accept": SSE}).text)
        assert last["result"]["stats"]
        forms = http.get(f"{path}/result", headers={"accept": FORM}).status_code
        assert forms == (406 if page.endswith("verify") else 200)
        problem(http.get(f"{path}/result", headers={"accept": FRAMES}), 406, "not_acceptable")


def test_rpc(http: httpx.Client) -> None:
    """JSON-RPC submits any method that may be a job, in a batch too, and lists, shows and deletes jobs."""
    inputs = SMALL.inputs()
    params = document(SMALL, inputs)
    first = rpc(http, "jobs.submit", method=SMALL.op, params=[params["attributes"], params["inputs"]]).json()["result"]
    # the key may have one call at a time, and a job that runs is one
    wait_for(lambda: rpc(http, "jobs.get", job=first["job"]).json()["result"]["state"] == "done")
    again: dict[str, Any] = {
        "jsonrpc": "2.0",
        "id": 2,
        "method": "jobs.submit",
        "params": {"method": "ops.verify", "params": {}},
    }
    again["params"]["params"] = {"op": SMALL.op, **document(SMALL, inputs | {"diff_weights": SMALL.expected(inputs)})}
    call, second = http.post("/rpc", json=[rpc_request(SMALL, inputs), again]).json()
    assert "result" in call
    for job in (first, second["result"]):
        wait_for(lambda job=job: rpc(http, "jobs.get", job=job["job"]).json()["result"]["state"] == "done")  # type: ignore[misc]
    assert rpc(http, "jobs.result", job=second["result"]["job"]).json()["result"]["passed"]
    listed = rpc(http, "jobs.list").json()["result"]["jobs"]
    assert [job["job"] for job in listed] == [second["result"]["job"], first["job"]]
    assert [job["kind"] for job in listed] == ["verify", "compute"]
    rpc(http, "jobs.cancel", job=first["job"])
    error = rpc(http, "jobs.get", job=first["job"]).json()["error"]
    assert (error["code"], error["data"]["reason"]) == (-32008, "unknown_job")


def test_cancelling_a_running_job(http: httpx.Client, resident: Resident) -> None:
    """Deleting a running job stops its work at once; its result is an error; the second time it is forgotten."""
    path = running(http)
    problem(http.get(f"{path}/result"), 404, "not_found")
    waiting = post(http, SMALL, SMALL.inputs(), headers=ASYNC)
    assert http.delete(path).json()["state"] == "cancelled"
    resident.until(lambda: resident.service.engine.snapshot()["jobs"] == 0)
    assert problem(http.get(f"{path}/result"), 404, "not_found")["state"] == "cancelled"
    done(http, waiting)
    assert http.delete(path).json()["state"] == "cancelled"
    problem(http.get(path), 404, "not_found")


def test_a_failed_job(http: httpx.Client) -> None:
    """A job that fails while it runs has the error of its call, as its state and as its result."""
    path = post(http, LASTING, LASTING.floats(), headers=ASYNC, deadline_ms=500, **SLOW).headers["location"]
    wait_for(lambda: http.get(path).json()["state"] == "failed")
    assert http.get(path).json()["error"]["code"] == "deadline_exceeded"
    problem(http.get(f"{path}/result"), 504, "deadline_exceeded")
    error = rpc(http, "jobs.result", job=path.rpartition("/")[2]).json()["error"]
    assert error["code"] == -32001


def test_a_key_of_one_call(http: httpx.Client) -> None:
    """While its job runs, a key that may make one call can submit, ask, and fetch results; others can call."""
    path = done(http, post(http, SMALL, SMALL.inputs(), headers=ASYNC))
    long = running(http)
    assert http.get(path).status_code == http.get(f"{path}/result").status_code == 200
    queued = post(http, SMALL, SMALL.inputs(), headers=ASYNC)
    assert queued.json()["place"] == 1
    assert post(http, SMALL, SMALL.inputs()).status_code == 429
    http.delete(long)
    done(http, queued)


def test_idempotency(http: httpx.Client) -> None:
    """The same key with the same request, in any form, is the same job; with another request it is refused."""
    inputs = SMALL.inputs()
    named = ASYNC | {"idempotency-key": '"mine"'}
    first = post(http, SMALL, inputs, headers=named).json()["job"]
    assert post(http, SMALL, inputs, headers=named).json()["job"] == first
    bare = ASYNC | {"idempotency-key": "mine"}
    for body in (
        document(SMALL, inputs),
        document(SMALL, inputs, as_npy=True),
        document(SMALL, inputs, as_numbers=True),
    ):
        assert http.post(PATH, json=body | {"options": {}}, headers=bare).json()["job"] == first
    result = rpc(http, "jobs.submit", method=SMALL.op, params=document(SMALL, inputs), idempotency_key="mine").json()
    assert result["result"]["job"] == first
    other = {**inputs, "src": inputs["src"] + 1}
    for changed in (post(http, SMALL, other, headers=named), post(http, SMALL, inputs, headers=named, encoding="npy")):
        assert problem(changed, 422, "invalid_params")["errors"][0]["type"] == "other_request"
    assert len(http.get("/v1/jobs").json()["jobs"]) == 1


def test_submitting_twice_at_the_same_time(http: httpx.Client, resident: Resident) -> None:
    """Eight clients that submit the same request with the same key, at the same time, get one job."""
    content = httpx.Request("POST", resident.url, files=parts(SMALL, SMALL.inputs()))
    headers = {"content-type": content.headers["content-type"], "idempotency-key": "one", **ASYNC}
    headers["x-api-key"] = KEY
    body, start, found = content.read(), threading.Barrier(8), list[str]()

    def submit() -> None:
        with httpx.Client(base_url=resident.url, timeout=60) as client:
            client.get("/healthz")
            start.wait()
            found.append(client.post(PATH, content=body, headers=headers).json()["job"])

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({*found}) == len(http.get("/v1/jobs").json()["jobs"]) == 1


def test_a_full_spool(http: httpx.Client, spool: Path) -> None:
    """A job for which the key has no room gets 507, or -32000, with what to do; nothing of it is written."""
    large = doubled(2048, 1, 2)
    kept = running(http)
    files = sorted((spool / "requests").iterdir())
    found = problem(post(http, large, large.floats(), headers=ASYNC), 507, "overloaded")
    assert (found["reason"], found["limit"]) == ("spool_key", LIMIT)
    assert "DELETE /v1/jobs/{job}" in found["detail"]
    assert sorted((spool / "requests").iterdir()) == files
    http.delete(kept)


def test_what_is_no_job(http: httpx.Client) -> None:
    """Other preferences have no effect, and validations are answered at once."""
    body = document(SMALL, SMALL.inputs())
    assert http.post(f"{PATH}/validate", json=body, headers=ASYNC).status_code == 200
    for preference in ("wait=10", "respond-asynchronously", "handling=strict"):
        assert "preference-applied" not in http.post(PATH, json=body, headers={"prefer": preference}).headers
    both = http.post(PATH, json=body, headers={"prefer": "wait=10, Respond-Async; x=1"})
    assert both.status_code == 202


def test_metrics(http: httpx.Client, resident: Resident) -> None:
    """Jobs are counted by state, with their bytes; calls of jobs have the API `jobs`."""
    path = done(http, post(http, SMALL, SMALL.inputs(), headers=ASYNC))

    def shown(name: str) -> float:
        lines = httpx.get(f"{resident.url}/metrics", headers={"x-api-key": KEY}).text.splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")))

    wait_for(lambda: shown('convgrad_jobs{state="done"}') == 1 and shown("convgrad_spool_bytes") > 0)
    assert shown("convgrad_spool_limit_bytes") == 10 << 30
    assert shown("convgrad_jobs_taken_over_total") == 0
    http.delete(path)
    wait_for(lambda: shown('convgrad_jobs{state="done"}') == 0 and shown("convgrad_spool_bytes") == 0)


def test_a_service_without_jobs(tight: Resident, tight_http: httpx.Client) -> None:
    """Without the setting the preference has no effect, and there are no jobs."""
    reply = post(tight_http, SMALL, SMALL.inputs(), headers=ASYNC | {"idempotency-key": "x"})
    assert same_bits(read(reply), SMALL.expected(SMALL.inputs()))
    assert "preference-applied" not in reply.headers
    for path in ("/v1/jobs", "/v1/jobs/" + "0" * 32):
        assert problem(tight_http.get(path), 404, "not_found")["reason"] == "no_spool"
    error = rpc(tight_http, "jobs.submit", method=SMALL.op, params=document(SMALL, SMALL.inputs())).json()["error"]
    assert (error["code"], error["data"]["reason"]) == (-32008, "no_spool")
    assert "convgrad_jobs" not in tight_http.get("/metrics").text
