"""Valid requests with random changes: the answer is a result or a client error, never a server error."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import numpy as np

from tests.app import oip
from tests.app.samples import SMALL

INPUTS = SMALL.inputs()
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, 1.5, -0.0, 1e308),
    *("", "x", "[2, 2]", "2,2", "é", "\0", "\ud83d\ude00", "FP16", "INT64", "src"),
    *([], [[]], [1], [2, 2], [None], ["a"], [[[[1]]]]),
    *({}, {"a": 1}, {"type": "s64[]", "value": [2, 2]}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to every value inside a document."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in members for found in places(inner, (*path, key)))]


def mutate(rng: np.random.Generator, document: Any) -> Any:
    """Return a copy in which one value is changed, removed, renamed or duplicated."""
    document = copy.deepcopy(document)
    found = places(document)[1:]
    *way, last = found[rng.integers(len(found))]
    owner = document
    for key in way:
        owner = owner[key]
    match rng.integers(4):
        case 0:
            owner[last] = VALUES[rng.integers(len(VALUES))]
        case 1:
            del owner[last]
        case 2 if isinstance(owner, dict):
            owner[f"{last}s"] = owner.pop(last)
        case _ if isinstance(owner, list):
            owner.append(owner[last])
    return document


def test_changed_documents(http: httpx.Client) -> None:
    """Whatever the JSON of a request becomes, binary or not, the answer is a result or the protocol's error."""
    rng = np.random.default_rng(41)
    statuses = set()
    for number in range(500):
        binary = bool(number % 2)
        document: Any = oip.head(SMALL, INPUTS, binary=binary, id="a", outputs=[{"name": "diff_weights"}])
        for _ in range(rng.integers(1, 4)):
            document = mutate(rng, document)
        content, headers = oip.body(document, INPUTS if binary else {})
        response = oip.post(http, SMALL.op, content, headers)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 413), (response.status_code, document)
        assert response.status_code == 200 or list(response.json()) == ["error"]
    assert {200, 400} <= statuses


def test_changed_bytes(http: httpx.Client) -> None:
    """Whatever a request's bytes become, and whatever codings and lengths it claims, there is no server error."""
    rng = np.random.default_rng(43)
    for number in range(300):
        binary = bool(number % 2)
        content, headers = oip.body(oip.head(SMALL, INPUTS, binary=binary), INPUTS if binary else {})
        spoilt = bytearray(content)
        for at in rng.integers(len(spoilt), size=rng.integers(1, 5)):
            spoilt[at] = rng.integers(256)
        if number % 5 == 0:
            headers[oip.HEAD_LENGTH] = str(rng.integers(2 * len(content)))
        if number % 7 == 0:
            headers["content-encoding"] = str(rng.choice(["gzip", "deflate"]))
        response = oip.post(http, SMALL.op, iter([bytes(spoilt[:77]), bytes(spoilt[77:])]), headers)
        assert response.status_code in (200, 400, 413), (response.status_code, response.text)
        if response.status_code != 200:
            assert list(json.loads(response.text)) == ["error"]
