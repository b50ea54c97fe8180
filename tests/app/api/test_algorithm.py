"""The algorithm that the caller chooses: the same bits on every API, refused where Winograd's can't compute it."""

from __future__ import annotations

from dataclasses import replace

import httpx
import numpy as np
import pytest

import convgrad
from kernels.target import target
from tests.app import graph
from tests.app.everywhere import everywhere
from tests.app.samples import FRAMES, SMALL, frames, post, same_bits
from tests.live import LiveService
from tests.problems import Case

pytestmark = pytest.mark.skipif(not target().compiles, reason="nothing is compiled")

LAYER = Case(
    n=2, src_channels=16, dst_channels=20, src_spatial=(9, 7), dst_spatial=(9, 7), kernel=(3, 3), pads_begin=(1, 1),
    pads_end=(1, 1),
)  # fmt: skip
TURNED = replace(LAYER.mirrored(), data_format="NXC")
STRIDED = replace(LAYER, strides=(2, 1), dst_spatial=(5, 7))
RULE = "winograd takes strides of 1 in the last two axes; strides[0] is 2"


@pytest.mark.parametrize(
    "case",
    [
        LAYER,
        TURNED,
        replace(LAYER, dtype="bf16"),
        replace(LAYER, op="Convolution"),
        replace(LAYER, op="ConvolutionBackwardData", data_format="NXC"),
    ],
    ids=["plain", "turned", "bf16", "forward", "data"],
)
def test_every_api_gives_the_same_bits(service: LiveService, case: Case) -> None:
    """Winograd's sums of small integers are exact; others have the same bits everywhere, not those of direct ones."""
    inputs = case.inputs()
    for api, found in everywhere(service, case, inputs, algorithm="winograd").items():
        assert same_bits(found, case.expected(inputs)), api
    inputs = case.floats()
    first, *others = everywhere(service, case, inputs, algorithm="winograd").values()
    assert all(same_bits(first, found) for found in others)
    direct = everywhere(service, case, inputs, algorithm="direct").values()
    assert not any(same_bits(first, found) for found in direct)


def test_the_reply_says_which_it_was(http: httpx.Client, client: convgrad.Client) -> None:
    """`stats` always has the algorithm, of each output too; `resolved` has it if the caller chose one."""
    inputs, named = LAYER.inputs(), LAYER.attributes()
    plain = client.run_detailed(LAYER.op, inputs, named)
    assert (plain.stats["algorithm"], "algorithm" in plain.resolved) == ("direct", False)
    chosen = client.run_detailed(LAYER.op, inputs, named, algorithm="winograd")
    assert (chosen.stats["algorithm"], chosen.resolved["algorithm"]) == ("winograd", "winograd")
    begin = next(frames(post(http, LAYER, inputs, FRAMES, algorithm="winograd").content))[0]
    assert begin["resolved"]["algorithm"] == "winograd"
    several = inputs | {"weights": np.ones(LAYER.weights_shape, np.float32)}
    names = ["diff_src", "diff_weights", "diff_bias"]
    of_each = client.run_detailed(LAYER.op, several, named, outputs=names, algorithm="winograd").stats["outputs"]
    assert [of_each[name]["algorithm"] for name in names] == ["winograd", "winograd", "direct"]
    sent = graph.body(dict(enumerate(inputs.values())), graph=graph.of_case(LAYER), options={"algorithm": "winograd"})
    (told,) = http.post("/v1/graphs", json=sent).json()["nodes"]
    assert (told["stats"]["algorithm"], told["resolved"]["algorithm"]) == ("winograd", "winograd")


@pytest.mark.parametrize("case", [SMALL, replace(LAYER, op="Convolution")])
def test_auto_is_never_refused(client: convgrad.Client, case: Case) -> None:
    """`auto` sums directly, with the same bits, what Winograd's can't compute."""
    inputs = case.floats()
    found = client.run_detailed(case.op, inputs, case.attributes(), algorithm="auto")
    assert found.stats["algorithm"] == found.resolved["algorithm"] == "direct"
    assert same_bits(found.array, client.run(case.op, inputs, case.attributes()))


@pytest.mark.parametrize(
    ("case", "rules"),
    [
        (replace(LAYER, src_channels=15), ["winograd takes at least 16 src channels of a group; there are 15"]),
        (
            replace(LAYER, op="ConvolutionBackwardData", src_channels=15),
            ["winograd takes at least 16 src channels of a group; there are 15"],
        ),
        (
            replace(LAYER, op="BiasAdd", src_channels=20, bias=True),
            ["winograd computes convolutions and their gradients of data and weights; BiasAdd computes dst"],
        ),
        (
            replace(LAYER, kernel=(3, 5), dilations=(2, 1), dst_spatial=(7, 5)),
            ["kernel of 3 in the last two axes; kernel[1] is 5", "of 1 in the last two axes; dilations[0] is 2"],
        ),
    ],
    ids=["channels", "data", "operation", "kernel and dilations"],
)
def test_validate_says_why(client: convgrad.Client, case: Case, rules: list[str]) -> None:
    """Each rule is named, in the error and in the plan of the call without the option."""
    with pytest.raises(convgrad.InvalidParams) as caught:
        client.validate(case.op, case.inputs(), case.attributes(), algorithm="winograd")
    listed = [error["msg"] for error in caught.value.errors]
    assert all(each.endswith(rule) for each, rule in zip(listed, rules, strict=True))
    told = client.validate(case.op, case.inputs(), case.attributes())["plan"]
    assert (told["algorithm"], told["winograd"]["allowed"]) == ("direct", False)
    assert [each["rule"] for each in told["winograd"]["refused"]] == listed


def test_validate_says_what_it_costs(client: convgrad.Client) -> None:
    """A 2x2 tile needs 16 products, where direct sums need 36; odd sizes are filled up."""
    told = client.validate(LAYER.op, LAYER.inputs(), LAYER.attributes(), algorithm="winograd")
    assert (told["resolved"]["algorithm"], told["plan"]["algorithm"]) == ("winograd", "winograd")
    tiles = 2 * (-(-9 // 2) * -(-7 // 2))
    winograd = told["plan"]["winograd"]
    assert (winograd["allowed"], winograd["gmac"]) == (True, pytest.approx(tiles * 16 * 16 * 20 / 1e9))
    assert winograd["exact_product"] == 2**24 // (16 * tiles)
    forward = replace(LAYER, op="Convolution")
    told = client.validate(forward.op, forward.inputs(), forward.attributes())["plan"]["winograd"]
    assert (told["gmac"], told["exact_product"]) == (winograd["gmac"], 2**24 // (36 * 16))
    (one,) = client.validate_graph(graph.of_case(LAYER), algorithm="winograd")["nodes"]
    assert (one["algorithm"], one["resolved"]["algorithm"]) == ("winograd", "winograd")


def test_a_graph_needs_a_convolution_for_winograd(client: convgrad.Client) -> None:
    """Sums of a bias beside convolutions and their gradients are direct; a graph that has nothing else is refused."""
    dumped = graph.dump()
    with pytest.raises(
        convgrad.InvalidParams, match=r"node 0.*: winograd takes at least 16 src channels .* 3 \(and \d+ more"
    ):
        client.validate_graph(dumped, algorithm="winograd")
    added = replace(LAYER, op="BiasAdd", src_channels=20, bias=True)
    dumped = graph.of_case(added)
    with pytest.raises(convgrad.InvalidParams, match=r"winograd computes convolutions .*; BiasAdd computes dst"):
        client.validate_graph(dumped, algorithm="winograd")
    dumped["graph"] += graph.of_case(LAYER)["graph"]
    dumped["graph"][-1]["id"] = 8
    for tensor in (*dumped["graph"][-1]["inputs"], *dumped["graph"][-1]["outputs"]):
        tensor["id"] += 100
    told = client.validate_graph(dumped, algorithm="winograd")["nodes"]
    assert {each["id"]: each["algorithm"] for each in told} == {7: "direct", 8: "winograd"}
