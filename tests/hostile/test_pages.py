"""Every bad request of the table of pages: its answer, and that nothing is kept of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import httpx
import pytest

from tests.app.resident import Resident, resident_service
from tests.app.samples import digest, document, wait_for
from tests.hostile.apis import EXPECTED, INPUTS, TINY
from tests.hostile.pages import KEY, PAGES, Page

OTHER = "cg_second-of-two-keys"
PATH = f"/v1/ops/{TINY.op}"
ASYNC = {"prefer": "respond-async", "idempotency-key": "mine"}


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resident]:
    """A service with jobs and two keys."""
    keys = f"one {digest(KEY)};two {digest(OTHER)}"
    with resident_service(workers=1, keys=keys, spool=tmp_path_factory.mktemp("spool")) as resident:
        yield resident


@pytest.fixture(scope="module")
def callers(resident: Resident) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """HTTP clients with the two keys; the first one's is the caller's."""
    one, two = (
        httpx.Client(base_url=resident.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        for key in (KEY, OTHER)
    )
    with one, two:
        yield one, two


@pytest.fixture(scope="module")
def names(callers: tuple[httpx.Client, httpx.Client]) -> Mapping[str, str]:
    """A job and a handle of the second key, and a handle of the first one that was dropped."""
    body, found = document(TINY, INPUTS), dict[str, str]()
    uploads = [{"inputs": {"tensor": body["inputs"]["src"]}}] * 2
    for caller, upload, name in zip(callers, uploads, ("{dropped}", "{handle}"), strict=True):
        path = caller.post(PATH, json=body, headers=ASYNC).headers["location"]
        wait_for(lambda caller=caller, path=path: caller.get(path).json()["state"] == "done")  # type: ignore[misc]
        found |= {"{job}": path.rpartition("/")[2], name: caller.post("/v1/tensors", json=upload).json()["handle"]}
    assert callers[0].delete(f"/v1/tensors/{found['{dropped}']}").status_code == 200
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages(
    resident: Resident, callers: tuple[httpx.Client, httpx.Client], names: Mapping[str, str], page: Page
) -> None:
    """Each page gives the answer of the table, and the caller has one job and no tensor, as before."""
    verb, path = page.request.split()
    body = page.body
    for name, value in names.items():
        path, body = path.replace(name, value), body.replace(name.encode(), value.encode())
    reply = callers[0].request(verb, path, content=body, headers=page.headers)
    answer = reply.json() if "json" in reply.headers.get("content-type", "") else {}
    found = answer.get("error", {}).get("code") or (answer.get("code") if reply.status_code >= 400 else None)
    assert (reply.status_code, found) == page.answer, reply.text[:500]
    assert len(reply.content) < 50_000
    assert len(callers[0].get("/v1/jobs").json()["jobs"]) == len(callers[1].get("/v1/jobs").json()["jobs"]) == 1
    assert len(resident.service.kept_tensors._kept) == 1
    assert same_result(callers[1], names["{job}"])


def same_result(caller: httpx.Client, job: str) -> bool:
    """Return whether the result of a job is still there, and right."""
    reply = caller.get(f"/v1/jobs/{job}/result", headers={"accept": "application/x-npy"})
    return reply.status_code == 200 and reply.content.endswith(EXPECTED.tobytes())
