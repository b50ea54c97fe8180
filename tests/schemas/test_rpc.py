"""JSON-RPC 2.0 messages as objects."""

from __future__ import annotations

import math
from typing import Any

import pytest

from convgrad._errors import InvalidParams
from schemas.rpc import Batch, Invalid, Request, bind_params, error_response, parse_message

PARAMS = ("attributes", "inputs", "options")


def message(**members: Any) -> dict[str, Any]:
    """Return a valid request with some members changed."""
    return {"jsonrpc": "2.0", "method": "ops.list", "id": 1} | members


@pytest.mark.parametrize("given", ["", "abc", 0, -7, 2**70, 1.5, None])
def test_ids_keep_value_and_type(given: Any) -> None:
    """An id is a string, a number or null, and is returned unchanged; without one a request is a notification."""
    found = parse_message(message(id=given))
    assert found == Request("ops.list", None, given)
    assert isinstance(found, Request)
    assert type(found.id) is type(given)
    assert not found.is_notification
    bare = parse_message({name: value for name, value in message().items() if name != "id"})
    assert isinstance(bare, Request)
    assert bare.is_notification


@pytest.mark.parametrize("given", [True, [], {}, math.nan, math.inf, "\ud800", "x" * 5000])
def test_ids_of_other_types_are_invalid(given: Any) -> None:
    """Any other id makes the request invalid, and the answer's id null."""
    found = parse_message(message(id=given))
    assert found == Invalid("id must be a string of at most 4096 characters, a number or null")


@pytest.mark.parametrize("params", [[], {}, [1, "a"], {"op": "x"}])
def test_params_by_position_or_by_name(params: Any) -> None:
    """Params may be an array or an object."""
    found = parse_message(message(params=params))
    assert isinstance(found, Request)
    assert found.params == params


@pytest.mark.parametrize(
    ("payload", "rule", "found_id"),
    [
        (message(jsonrpc="1.0"), "jsonrpc", 1), (message(jsonrpc=2.0), "jsonrpc", 1),
        ({"method": "x", "id": "a"}, "jsonrpc", "a"), ({"jsonrpc": "2.0", "id": 4}, "method", 4),
        (message(method=1), "method", 1), ({"jsonrpc": "2.0"}, "method", None),
        *((message(params=wrong), "params", 1) for wrong in ("bar", None, 3)),
        *((wrong, "request", None) for wrong in (3, None, "x")),
        ([], "batch", None), ([message()] * 1001, "batch", None),
    ],
)  # fmt: skip
def test_invalid_requests(payload: Any, rule: str, found_id: Any) -> None:
    """An invalid request is answered with its id, or null if it has none."""
    found = parse_message(payload)
    assert isinstance(found, Invalid)
    assert found.message.startswith((rule, f"a {rule}"))
    assert found.id == found_id


def test_a_mixed_batch() -> None:
    """A batch keeps its order, and each of its invalid items gets its own answer."""
    found = parse_message([message(id=1), 1, message(id="b"), {"foo": "boo"}, []])
    assert isinstance(found, Batch)
    assert [item.id for item in found.items] == [1, None, "b", None, None]
    assert [isinstance(item, Request) for item in found.items] == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("params", "found"),
    [
        (None, {}), ([], {}), ({}, {}), ([{}], {"attributes": {}}),
        ([1, 2, 3], {"attributes": 1, "inputs": 2, "options": 3}),
        ({"inputs": 2, "attributes": 1}, {"attributes": 1, "inputs": 2}),
    ],
)  # fmt: skip
def test_params_are_bound_to_names(params: Any, found: dict[str, Any]) -> None:
    """The positional order is attributes, inputs, options."""
    assert bind_params(params, PARAMS) == found


@pytest.mark.parametrize(
    ("params", "where"),
    [
        ([1, 2, 3, 4], ["params"]), ({"attribute": 1}, ["attribute"]), ({"inputs": 1}, ["attributes"]),
        (None, ["attributes"]), ({"\ud800": 1, "attributes": 1}, ["?"]),
    ],
)  # fmt: skip
def test_params_that_do_not_fit(params: Any, where: list[str]) -> None:
    """A surplus, unknown or missing parameter is reported by its name."""
    with pytest.raises(InvalidParams) as caught:
        bind_params(params, PARAMS, required=("attributes",))
    assert where in [problem["loc"] for problem in caught.value.errors]
    assert ("did you mean attributes" in str(caught.value)) is (where == ["attribute"])


def test_error_responses() -> None:
    """Error responses have the members of the specification, and no others."""
    assert error_response(None, -32600, "no") == {
        "jsonrpc": "2.0",
        "error": {"code": -32600, "message": "no"},
        "id": None,
    }
    assert error_response(1, -32602, "no", {"errors": []})["error"]["data"] == {"errors": []}
