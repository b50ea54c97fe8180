"""The client against the real service and in this process, and the command."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import AsyncClient, Client, Progress, Tile
from convgrad._cli import main
from tests.live import LiveService
from tests.problems import Case, random_case

LAYER = Case(
    name="a strided layer", op="ConvTransposeBackwardWeights", n=4, src_channels=32, dst_channels=48,
    src_spatial=(14, 14), dst_spatial=(28, 28), kernel=(4, 4), strides=(2, 2), pads_begin=(1, 1), pads_end=(1, 1),
    weights_format="IOX", groups_axis="O",
)  # fmt: skip


def inputs_of(case: Case) -> dict[str, Any]:
    """Return the case's tensors in a form that can be passed as keywords."""
    return dict(case.inputs())


def same_bits(computed: Any, case: Case, inputs: dict[str, Any]) -> None:
    """Compare a result with the oracle's, bit for bit."""
    expected = case.expected(inputs)
    assert (computed.dtype, computed.shape) == (expected.dtype, expected.shape), case
    np.testing.assert_array_equal(computed, expected, err_msg=str(case))


@pytest.mark.parametrize("seed", range(16))
def test_random_calls_have_the_oracles_bits(live: Client, seed: int) -> None:
    """Any operation, rank, dtype, layout and format returns exactly the oracle's result."""
    case = replace(random_case(np.random.default_rng(seed)), seed=seed)
    inputs = inputs_of(case)
    same_bits(live.run(case.op, inputs, case.attributes()), case, inputs)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_methods_of_the_operations(live: Client, dtype: str) -> None:
    """Each method computes its operation, with the attributes as keywords."""
    case = replace(LAYER, dtype=dtype)
    mirrored = case.mirrored()
    for each, call in (
        (case, live.conv_transpose_backward_weights),
        (mirrored, live.convolution_backward_weights),
        (replace(case, op="ConvTranspose", bias=True), live.conv_transpose),
        (replace(case, op="ConvTransposeBackwardData"), live.conv_transpose_backward_data),
        (replace(mirrored, op="Convolution", bias=True), live.convolution),
        (replace(mirrored, op="ConvolutionBackwardData"), live.convolution_backward_data),
    ):
        inputs = inputs_of(each)
        same_bits(call(**inputs, **each.attributes()), each, inputs)


def test_the_reference_agrees(live: Client) -> None:
    """The reference kernel returns the same bits on integers, and the statistics name it."""
    inputs = inputs_of(LAYER)
    fast = live.run_detailed(LAYER.op, inputs, LAYER.attributes())
    slow = live.run_detailed(LAYER.op, inputs, LAYER.attributes(), reference=True)
    np.testing.assert_array_equal(fast.array, slow.array)
    assert fast.stats["kernel"] != slow.stats["kernel"]
    assert fast.stats["gmac"] == slow.stats["gmac"] > 0


def test_old_names(live: Client) -> None:
    """A call in the old dialect is answered in it."""
    inputs, attributes = inputs_of(LAYER), LAYER.attributes()
    old = {"input_forward": inputs["src"], "output_delta": inputs["diff_dst"]}
    attributes["filter_format"] = attributes.pop("weights_format")
    old["filter_shape"] = attributes.pop("weights_shape")
    result = live.run_detailed("ConvTransposeBackpropFilters-1", old, attributes)
    assert list(result.outputs) == ["filter_delta"]
    assert result.resolved["filter_shape"] == [32, 48, 4, 4]
    same_bits(result.array, LAYER, inputs)


def test_the_stream_is_the_result_in_parts(live: Client) -> None:
    """Progress reaches the total, and the tiles are disjoint and together the result."""
    inputs = inputs_of(LAYER)
    covered = np.zeros(LAYER.weights_shape, np.int64)
    shares = []
    with live.stream(LAYER.op, inputs, LAYER.attributes()) as stream:
        for event in stream:
            if isinstance(event, Progress):
                shares.append(event.share)
            if isinstance(event, Tile):
                box = tuple(slice(at, at + size) for at, size in zip(event.offset, event.shape, strict=True))
                covered[box] += 1
                assert not event.data.flags.writeable
                np.testing.assert_array_equal(event.data, LAYER.expected(inputs)[box])
        same_bits(stream.result(), LAYER, inputs)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert (covered == 1).all()


def test_asyncio(service: LiveService) -> None:
    """The asyncio client runs several calls at a time, and streams."""
    inputs, attributes = inputs_of(LAYER), LAYER.attributes()

    async def use() -> None:
        async with AsyncClient(service.url) as client:
            calls = [client.conv_transpose_backward_weights(**inputs, **attributes) for _ in range(4)]
            for result in await asyncio.gather(*calls):
                same_bits(result, LAYER, inputs)
            async with client.stream(LAYER.op, inputs, attributes) as stream:
                assert any([isinstance(event, Tile) async for event in stream])
                same_bits(await stream.result(), LAYER, inputs)

    asyncio.run(use())


def test_errors(live: Client) -> None:
    """Errors have their own classes, that of a wrong call lists each broken rule, and the next call works."""
    inputs, attributes = inputs_of(LAYER), LAYER.attributes()
    with pytest.raises(convgrad.InvalidParams) as caught:
        live.run(LAYER.op, inputs, attributes | {"strides": [2, 0], "dilation": [1, 1]})
    places = [error["loc"] for error in caught.value.errors]
    assert ["attributes", "strides", 1] in places
    assert ["attributes", "dilation"] in places
    assert isinstance(live, convgrad.LocalClient) or caught.value.data["request_id"]
    with pytest.raises(convgrad.UnknownOperation):
        live.run("Convolve", inputs)
    with pytest.raises(convgrad.UnknownOperation):
        live.describe("Convolve")
    with pytest.raises(convgrad.CallerError):
        live.run(LAYER.op, inputs | {"src": inputs["src"].astype(np.int32)}, attributes)
    with pytest.raises(convgrad.DeadlineExceeded):
        live.run(LAYER.op, inputs, attributes, deadline=1e-6, reference=True)
    same_bits(live.run(LAYER.op, inputs, attributes), LAYER, inputs)


def test_pages(live: Client) -> None:
    """The service lists, describes and validates, and reports that it is ready."""
    names = [entry["op"] for entry in live.operations()]
    assert "ConvTransposeBackwardWeights" in names
    for name in names:
        assert live.describe(name)["attributes"]
    valid = live.validate(LAYER.op, inputs_of(LAYER), LAYER.attributes())
    assert valid["outputs"] == {"diff_weights": {"dtype": "f32", "shape": [32, 48, 4, 4]}}
    described = {name: {"dtype": "f32", "shape": list(shape)} for name, shape in LAYER.input_shapes.items()}
    assert live.validate(LAYER.op, described, LAYER.attributes()) == valid
    assert live.health().ready
    assert live.wait_until_ready(1).ready


def test_the_command(
    service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`convgrad run` writes the oracle's gradient, and the commands that take no files work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", service.url)
    files = []
    for name, array in inputs_of(LAYER).items():
        np.save(tmp_path / f"{name}.npy", array)
        files += [f"--{name.replace('_', '-')}", f"{name}.npy"]
    flags = [f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
             for name, value in LAYER.attributes().items()]  # fmt: skip
    arguments = [LAYER.op, *files, *(word for flag in flags for word in ("--attr", flag))]
    assert main(["run", *arguments, "-o", "dw.npy"]) == 0
    same_bits(np.load("dw.npy"), LAYER, inputs_of(LAYER))
    assert main(["validate", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["op"] == LAYER.op
    for command in (["ops"], ["describe", LAYER.op], ["health"], ["bench", "--seconds", "0"]):
        assert main(command) == 0
        assert capsys.readouterr().out
