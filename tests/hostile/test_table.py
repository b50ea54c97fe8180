"""Every bad request of the table: its answer on each API, and how long another client waits meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.app.samples import JSON, NPY, document, post, read, same_bits
from tests.hostile.apis import EXPECTED, INPUTS, TINY, Row, ask
from tests.hostile.table import ROWS
from tests.live import LiveService

# A stall of the event loop, on any machine: usually the other client waits for a few milliseconds.
LONGEST_WAIT_S = 5.0


@pytest.fixture(scope="module")
def longest(service: LiveService) -> Iterator[Callable[[], float]]:
    """Another client, which calls /healthz all the time: its longest wait, in seconds, since this was last called."""
    waits, stop = [0.0], threading.Event()

    def work() -> None:
        with httpx.Client(base_url=service.url, timeout=60.0) as client:
            while not stop.is_set():
                began = time.perf_counter()
                assert client.get("/healthz").status_code == 200
                waits.append(time.perf_counter() - began)
                stop.wait(0.01)

    def since_then() -> float:
        count = len(waits)
        found = max(waits[:count])
        del waits[: count - 1]
        return found

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield since_then
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_table(http: httpx.Client, longest: Callable[[], float], row: Row) -> None:
    """Each API gives the answer of the table, no other client waits for long, and the next call is right."""
    for api in row.apis:
        assert ask(http, api, row) == row.expected(api), api
        assert longest() < LONGEST_WAIT_S, api
    assert same_bits(read(post(http, TINY, INPUTS, NPY)), EXPECTED)


def escaped(text: str) -> str:
    """Escape every letter inside the strings of a document."""
    parts = enumerate(text.split('"'))
    return '"'.join("".join(f"\\u{ord(char):04x}" for char in part) if number % 2 else part for number, part in parts)


CALL = document(TINY, INPUTS)
NOTATIONS: dict[str, bytes] = {
    "byte order mark": b"\xef\xbb\xbf" + json.dumps(CALL).encode(),
    "white space": json.dumps(CALL, indent=9).encode() + b"\r\n\t " * 50,
    "all escaped": escaped(json.dumps(CALL)).encode(),
    "null members": json.dumps(CALL | {"options": None}).encode(),
    "reversed": json.dumps({name: CALL[name] for name in reversed(CALL)}).encode(),
    "data first": json.dumps(
        CALL | {"inputs": {name: dict(reversed(value.items())) for name, value in CALL["inputs"].items()}}
    ).encode(),
}


@pytest.mark.parametrize("name", NOTATIONS)
def test_unusual_but_valid_json(http: httpx.Client, name: str) -> None:
    """The same document in another notation is the same call."""
    reply = http.post(f"/v1/ops/{TINY.op}", content=NOTATIONS[name], headers={"content-type": JSON})
    assert same_bits(read(reply), EXPECTED)
