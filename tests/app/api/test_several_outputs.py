"""Several outputs in one call: on every API, in every format, equal to the oracle and to one call for each."""

from __future__ import annotations

import email
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

import convgrad
from tests import naive
from tests.app import oip
from tests.app.resident import Resident
from tests.app.samples import (
    FRAMES,
    NPY,
    SMALL,
    SSE,
    Array,
    document,
    frames,
    messages,
    read_npy,
    read_tensor,
    same_bits,
)
from tests.live import LiveService
from tests.problems import Case, random_case

NAMES = ("diff_weights", "diff_bias", "diff_src")
WEIGHTS = ("ConvolutionBackwardWeights", "ConvTransposeBackwardWeights")
LARGE = Case(
    n=8, src_channels=64, dst_channels=64, src_spatial=(56, 56), dst_spatial=(56, 56), kernel=(3, 3),
    pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip


def with_weights(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the inputs of a weight gradient, weights included, and the oracle's outputs."""
    inputs = case.inputs()
    weights = case.rounded(np.random.default_rng(case.seed).integers(-2, 3, case.weights_shape))
    data = replace(case, op=case.op.replace("BackwardWeights", "BackwardData"))
    expected = {
        "diff_weights": case.expected(inputs),
        "diff_bias": case.rounded(naive.bias_gradient(inputs["diff_dst"], data_format=case.data_format)),
        "diff_src": data.expected({"diff_dst": inputs["diff_dst"], "weights": weights}),
    }
    return inputs | {"weights": weights}, expected


def gradients(count: int, seed: int) -> Iterator[tuple[Case, list[str]]]:
    """Draw weight gradients, and some outputs in any order."""
    rng = np.random.default_rng(seed)
    while count:
        case = random_case(rng)
        if case.op in WEIGHTS:
            count -= 1
            yield case, [str(name) for name in rng.permutation(NAMES)][: int(rng.integers(1, 4))]


def check(found: dict[str, Array], names: list[str], expected: dict[str, Array], case: Case) -> None:
    """Compare all outputs, and their order."""
    assert list(found) == names
    for name in names:
        assert same_bits(found[name], expected[name]), (name, case)


def test_the_client(client: convgrad.Client) -> None:
    """Any outputs of a weight gradient, in any order, have the oracle's bits, streamed tile by tile."""
    for case, names in gradients(15, 1):
        inputs, expected = with_weights(case)
        result = client.run_detailed(case.op, inputs, case.attributes(), outputs=names)
        check(dict(result.outputs), names, expected, case)
        assert result.stats["gmac"] > 0 or not case.n
        assert ("outputs" in result.stats) == (len(names) > 1)


def test_tiles_name_their_output(client: convgrad.Client) -> None:
    """A stream has the tiles of one output after another, and one progress over all of them."""
    inputs, expected = with_weights(LARGE)
    with client.stream(LARGE.op, inputs, LARGE.attributes(), outputs=NAMES) as stream:
        events = list(stream)
        result = stream.details()
    check(dict(result.outputs), list(NAMES), expected, LARGE)
    order = [event.output for event in events if isinstance(event, convgrad.Tile)]
    assert order == sorted(order, key=NAMES.index)
    assert set(order) == set(NAMES)
    done = [event.done for event in events if isinstance(event, convgrad.Progress)]
    assert done == sorted(done)
    assert done[-1] == next(event.total for event in events if isinstance(event, convgrad.Progress))


@pytest.mark.parametrize("encoding", ["base64", "npy", "list"])
def test_json_multipart_and_events(http: httpx.Client, encoding: str) -> None:
    """JSON and JSON-RPC have every tensor, a multipart reply every file, and the last event every checksum."""
    for case, names in gradients(8, 2):
        inputs, expected = with_weights(case)
        body = document(case, inputs, encoding=encoding, outputs=names)
        url = f"/v1/ops/{case.op}"
        call = {"jsonrpc": "2.0", "id": 1, "method": case.op, "params": body}
        for reply in (http.post(url, json=body).json(), http.post("/rpc", json=call).json()["result"]):
            check({name: read_tensor(tensor) for name, tensor in reply["outputs"].items()}, names, expected, case)
        files = http.post(url, json=body, headers={"accept": "multipart/form-data"})
        message = email.message_from_bytes(
            b"Content-Type: " + files.headers["content-type"].encode() + b"\r\n\r\n" + files.content
        )
        parts: Any = message.get_payload()
        found = {
            part.get_param("name", header="content-disposition"): part.get_payload(decode=True) for part in parts[1:]
        }
        check({name: read_npy(data, case.dtype) for name, data in found.items()}, names, expected, case)
        *told, last = messages(http.post(url, json=body, headers={"accept": SSE}).text)
        assert list(last["result"]["outputs"]) == names
        assert all(one["params"]["output"] in names for one in told if one["method"] == "notifications/tile")


def test_many_numbers_before_binary_outputs(service: LiveService) -> None:
    """One reply has an output as more numbers than are formatted at once, and others as the bytes after the JSON."""
    inputs, expected = with_weights(LARGE)
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        sent = [oip.tensor(name, array, "FP32") for name, array in inputs.items()]
        asked = [triton.InferRequestedOutput(name, binary_data=name != "diff_weights") for name in NAMES]
        result = client.infer(LARGE.op, sent, outputs=asked, parameters=LARGE.attributes())
        check({name: result.as_numpy(name) for name in NAMES}, list(NAMES), expected, LARGE)


def test_triton(service: LiveService) -> None:
    """An unmodified tritonclient asks for outputs by name, each as bytes or as numbers."""
    rng = np.random.default_rng(4)
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        for case, names in gradients(12, 4):
            inputs, expected = with_weights(case)
            sent = [oip.tensor(name, array, oip.OIP[case.dtype]) for name, array in inputs.items()]
            asked = [triton.InferRequestedOutput(name, binary_data=bool(rng.integers(2))) for name in names]
            result = client.infer(case.op, sent, outputs=asked, parameters=case.attributes())
            assert [output["name"] for output in result.get_response()["outputs"]] == names
            for name in names:
                assert np.array_equal(result.as_numpy(name).astype(np.float64), expected[name].astype(np.float64))


def test_frames_are_a_stream_for_each_output(http: httpx.Client) -> None:
    """Each output is a whole stream of its own, from `begin` to `end`; every `begin` names all of them."""
    inputs, _ = with_weights(SMALL)
    body = document(SMALL, inputs, outputs=list(NAMES))
    content = http.post(f"/v1/ops/{SMALL.op}", json=body, headers={"accept": FRAMES}).content
    heads = [head for head, _ in frames(content)]
    assert [head["output"] for head in heads if head["type"] == "begin"] == list(NAMES)
    assert all(head["outputs"] == list(NAMES) for head in heads if head["type"] == "begin")
    assert [head["type"] for head in heads if head["type"] in ("begin", "end")] == ["begin", "end"] * 3


def test_an_npy_reply_has_one_output(http: httpx.Client) -> None:
    """A `.npy` reply to a call of several outputs is refused with 406, before anything is computed; one is fine."""
    inputs, expected = with_weights(SMALL)
    url, headers = f"/v1/ops/{SMALL.op}", {"accept": NPY}
    refused = http.post(url, json=document(SMALL, inputs, outputs=["diff_weights", "diff_bias"]), headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (406, "not_acceptable")
    single = http.post(url, json=document(SMALL, inputs, outputs=["diff_bias"]), headers=headers)
    assert same_bits(read_npy(single.content, "f32"), expected["diff_bias"])


@pytest.mark.parametrize(
    ("outputs", "loc"),
    [
        (["dst"], ["options", "outputs", 0]),
        (["diff_bias", "bias_delta"], ["options", "outputs", 1]),
        *((outputs, ["options", "outputs"]) for outputs in ([], "diff_bias", [1])),
        (["diff_src"], ["inputs", "weights"]),
    ],
)
def test_wrong_outputs(http: httpx.Client, outputs: Any, loc: list[Any]) -> None:
    """Unknown, repeated and malformed outputs are refused, and one whose input is missing."""
    body = document(SMALL, SMALL.inputs(), outputs=outputs)
    (error,) = http.post(f"/v1/ops/{SMALL.op}", json=body).json()["errors"]
    assert error["loc"] == loc


def test_weights_and_their_shape(client: convgrad.Client) -> None:
    """Weights give `weights_shape`, must agree with one that is given, and cause a warning where nothing reads them."""
    inputs, expected = with_weights(SMALL)
    attributes = {name: value for name, value in SMALL.attributes().items() if name != "weights_shape"}
    result = client.run_detailed(SMALL.op, inputs, attributes, outputs=["diff_src", "diff_weights"])
    check(dict(result.outputs), ["diff_src", "diff_weights"], expected, SMALL)
    (warning,) = client.run_detailed(SMALL.op, inputs, attributes).warnings
    assert "weights is not read" in warning
    wrong = [*SMALL.weights_shape[:-1], SMALL.weights_shape[-1] + 1]
    with pytest.raises(convgrad.InvalidParams, match="must have the shape"):
        client.run_detailed(SMALL.op, inputs, {**attributes, "weights_shape": wrong}, outputs=["diff_src"])


def test_old_names(client: convgrad.Client) -> None:
    """Under an old name the outputs have their old names, whichever spelling asked for them."""
    inputs, expected = with_weights(SMALL)
    result = client.run_detailed(
        "ConvTransposeBackpropFilters", inputs, SMALL.attributes(), outputs=["diff_bias", "input_delta"]
    )
    assert list(result.outputs) == ["bias_delta", "input_delta"]
    assert same_bits(result.outputs["bias_delta"], expected["diff_bias"])
    assert same_bits(result.outputs["input_delta"], expected["diff_src"])


def test_the_memory_of_all_outputs_is_freed(tight: Resident) -> None:
    """A call that its reader leaves in the middle of its second output stops, and frees everything."""
    case = replace(LARGE, n=2)
    inputs, _ = with_weights(case)
    with convgrad.Client(tight.url) as client:
        with client.stream(case.op, inputs, case.attributes(), outputs=["diff_bias", "diff_src"]) as stream:
            next(event for event in stream if isinstance(event, convgrad.Tile) and event.output == "diff_src")
        tight.until(lambda: not tight.service.calls and tight.service.segments.stats().used == 0)
