"""Verification on every API, by the client and by the command, of results computed elsewhere."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx
import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad._cli import main
from schemas.wire import VerifyReply
from tests.app.everywhere import command
from tests.app.resident import Resident
from tests.app.samples import SMALL, SSE, document, messages
from tests.kernels.harness import problem_of
from tests.live import LiveService, running_service
from tests.problems import Case, random_case
from verify.report import report_work

LAYER = Case(
    name="layer", op="ConvolutionBackwardWeights", n=3, src_channels=6, dst_channels=8, src_spatial=(12, 10),
    dst_spatial=(12, 10), kernel=(3, 3), pads_begin=(1, 1), pads_end=(1, 1),
)  # fmt: skip


def test_right_results_of_every_operation(client: convgrad.Client) -> None:
    """The oracle's result of any call passes, equal in every bit."""
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(40):
        case = random_case(rng)
        inputs = case.inputs()
        report = client.verify(case.op, inputs, case.expected(inputs), case.attributes())
        assert report.passed, case
        assert report.equal, case
        assert report.data["output"] == case.output_name
        seen.add(case.op)
    assert len(seen) == 8


def test_json_and_rpc_agree(http: httpx.Client) -> None:
    """REST and JSON-RPC give the same report, under either spelling of the result's name."""
    inputs = SMALL.inputs()
    wrong = SMALL.expected(inputs)
    wrong[0, 0, 0, 0] += 1
    reports = []
    for name in ("diff_weights", "filter_delta"):
        body = document(SMALL, {**inputs, name: wrong})
        rest = http.post(f"/v1/ops/{SMALL.op}/verify", json=body)
        params = {"op": SMALL.op, **body}
        answer = http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "ops.verify", "params": params}).json()
        assert rest.status_code == 200
        reports += [rest.json(), answer["result"]]
    for report in reports:
        del report["stats"]
        assert report == reports[0]
        assert report["worst"]["index"] == [0, 0, 0, 0]
        assert report["factors"] == ["src", "diff_dst"]


def test_progress(http: httpx.Client, client: convgrad.Client) -> None:
    """As events, the work done comes before the report: from 0 to all units, on both APIs and in the client."""
    inputs = LAYER.inputs()
    result = LAYER.expected(inputs)
    body = document(LAYER, {**inputs, "diff_weights": result})
    rpc = {"jsonrpc": "2.0", "id": "a", "method": "ops.verify", "params": {"op": LAYER.op, **body}}
    for path, request in ((f"/v1/ops/{LAYER.op}/verify", body), ("/rpc", rpc)):
        reply = http.post(path, json=request, headers={"accept": SSE})
        *progress, last = messages(reply.text)
        done = [message["params"]["progress"] for message in progress]
        assert {message["method"] for message in progress} == {"notifications/progress"}
        assert done[0] == 0
        assert done == sorted(done)
        assert done[-1] == progress[-1]["params"]["total"] > 1
        assert last["result"]["passed"]
    seen: list[convgrad.Progress] = []
    assert client.verify(LAYER.op, inputs, result, LAYER.attributes(), on_progress=seen.append).passed
    assert [event.done for event in seen] == done


@pytest.mark.heavy
def test_errors_after_the_first_progress(tight: Resident) -> None:
    """An error of the computation is the last event, and the client raises it."""
    big = replace(
        LAYER, n=16, src_channels=64, dst_channels=64, src_spatial=(20, 20), dst_spatial=(20, 20), kernel=(7, 7),
        pads_begin=(3, 3), pads_end=(3, 3),
    )  # fmt: skip
    inputs = big.inputs()
    wrong = np.zeros(big.output_shape, np.float32)
    seen: list[convgrad.Progress] = []

    def stop(progress: convgrad.Progress) -> None:
        if not seen:  # from now on nothing is computed until the deadline
            for worker in tight.service.engine.snapshot()["workers"]:
                os.kill(worker["pid"], signal.SIGSTOP)
        seen.append(progress)

    with convgrad.Client(tight.url) as client, pytest.raises(convgrad.DeadlineExceeded):
        client.verify(big.op, inputs, wrong, big.attributes(), deadline=2.0, on_progress=stop)
    assert seen
    tight.until(lambda: tight.service.engine.workers == (1, 1), 60.0)  # another worker than the one that was stopped


def test_other_outputs(client: convgrad.Client) -> None:
    """diff_bias and diff_src of a weight gradient are verified under their own names."""
    inputs = LAYER.inputs()
    bias = inputs["diff_dst"].sum((0, 2, 3))
    assert client.verify(LAYER.op, inputs, bias, LAYER.attributes(), output="diff_bias").equal
    weights = np.random.default_rng(1).integers(-2, 3, LAYER.weights_shape).astype(np.float32)
    data = replace(LAYER, op="ConvolutionBackwardData")
    expected = data.expected({"diff_dst": inputs["diff_dst"], "weights": weights})
    with_weights = {**inputs, "weights": weights}
    assert client.verify(LAYER.op, with_weights, expected, LAYER.attributes(), output="diff_src").equal


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_results_of_pytorch(client: convgrad.Client, transposed: bool, dtype: str) -> None:
    """A gradient and a forward result of PyTorch pass; one of a single image, since it may round after each image.

    The forward result of a transposed convolution is computed in f32 and rounded once: in f16 and bf16 PyTorch may
    round each tap's sum and add the taps in that dtype, which is hundreds of ULP off where they nearly cancel.
    """
    torch = pytest.importorskip("torch")
    torch.manual_seed(transposed)
    kind, stride = getattr(torch, dtype), 1 + transposed
    compute = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
    src = torch.randn(1, 12, 9, 9).to(kind)
    weights = torch.randn(*((12, 10) if transposed else (10, 12)), 3, 3).to(kind).requires_grad_()
    dst = compute(src, weights, stride=stride, padding=1)
    diff_dst = torch.randn(dst.shape).to(kind)
    dst.backward(diff_dst)
    if transposed:
        dst = compute(src.float(), weights.float(), stride=stride, padding=1).to(kind)

    def array(tensor: Any) -> Any:
        tensor = tensor.detach()
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if dtype == "bfloat16" else tensor.numpy()

    attributes: dict[str, Any] = {key: [1, 1] for key in ("dilations", "pads_begin", "pads_end")}
    attributes |= {"strides": [stride] * 2, "data_format": "NCX", "weights_format": "IOX" if transposed else "OIX"}
    op = "ConvTranspose" if transposed else "Convolution"
    gradient = {"src": array(src), "diff_dst": array(diff_dst), "weights_shape": list(weights.shape)}
    assert client.verify(f"{op}BackwardWeights", gradient, array(weights.grad), attributes).passed
    assert client.verify(op, {"src": array(src), "weights": array(weights)}, array(dst), attributes).passed


def test_the_report_of_a_wrong_pad(client: convgrad.Client, tmp_path: Path) -> None:
    """Text, picture and JUnit say that the result fails, and that its padding is on the wrong side."""
    inputs = LAYER.floats()
    wrong = replace(LAYER, pads_begin=(0, 1), pads_end=(2, 1)).expected(inputs)
    report = client.verify(LAYER.op, inputs, wrong, LAYER.attributes())
    text = report.text()
    assert not report.passed
    assert "FAILED" in text
    assert "as if pads_begin were [0, 1]" in text
    assert len(text.splitlines()) <= 25
    case = ET.fromstring(report.junit("my kernel")).find("testcase")
    assert case is not None
    assert case.get("name") == "my kernel"
    failure = case.find("failure")
    assert failure is not None
    assert failure.text == text
    report.save_png(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("inputs", "loc"),
    [
        ({}, ["inputs"]),
        ({"diff_weights": (8, 6, 3, 3), "diff_bias": (8,)}, ["inputs"]),
        ({"diff_weights": (8, 6, 3, 2)}, ["inputs", "diff_weights", "shape"]),
        ({"diff_bias": (7,)}, ["inputs", "diff_bias", "shape"]),
        ({"diff_src": (3, 6, 12, 10)}, ["inputs", "weights"]),
    ],
)
def test_wrong_results(http: httpx.Client, inputs: dict[str, tuple[int, ...]], loc: list[str]) -> None:
    """A missing result, several of them, and one of another shape are refused."""
    results = {name: np.zeros(shape, np.float32) for name, shape in inputs.items()}
    reply = http.post(f"/v1/ops/{LAYER.op}/verify", json=document(LAYER, {**LAYER.inputs(), **results}))
    assert (reply.status_code, reply.json()["errors"][0]["loc"]) == (422, loc)


@pytest.mark.parametrize("options", [{"outputs": ["diff_bias"]}, {"reference": True}, {"explain": "x"}, {"fast": 1}])
def test_options_of_other_tasks(http: httpx.Client, options: dict[str, Any]) -> None:
    """Options that a verification would ignore are refused, and wrong values of its own."""
    result = {"diff_weights": np.zeros(LAYER.output_shape, np.float32)}
    body = {**document(LAYER, {**LAYER.inputs(), **result}), "options": options}
    reply = http.post(f"/v1/ops/{LAYER.op}/verify", json=body)
    assert (reply.status_code, reply.json()["errors"][0]["loc"]) == (422, ["options", *options])


def test_the_cost_is_told_before(client: convgrad.Client) -> None:
    """Validating a call says what its verification would cost: its sums, each tap of each image, and the report."""
    told = client.validate(LAYER.op, LAYER.inputs(), LAYER.attributes())["plan"]
    taps = LAYER.n * 9
    report = report_work(problem_of(LAYER))
    assert report > 2**12 * np.prod(LAYER.output_shape)
    assert told["verify"]["gmac"] == pytest.approx(2 * told["gmac"] + (taps * 2**18 + report) / 1e9)
    assert told["verify"]["allowed"] is True
    assert told["verify"]["units"] == 10


def test_limits_and_memory(tight: Resident) -> None:
    """A verification of too many taps is refused; one that ends frees its memory."""
    case = Case(op="ConvolutionBackwardWeights", src_spatial=(1 << 15,), dst_spatial=(1,), kernel=(1 << 15,))
    inputs = case.inputs()
    with convgrad.Client(tight.url) as client:
        assert client.validate(case.op, inputs, case.attributes())["plan"]["verify"]["allowed"] is False
        with pytest.raises(convgrad.TooLarge, match="32768 units of the reference kernel"):
            client.verify(case.op, inputs, case.expected(inputs), case.attributes())
        assert client.verify(SMALL.op, SMALL.inputs(), SMALL.expected(SMALL.inputs()), SMALL.attributes()).equal
    tight.until(lambda: not tight.service.calls and tight.service.segments.stats().used == 0)


@pytest.mark.heavy
def test_the_number_of_workers_does_not_change_the_report(tight: Resident) -> None:
    """One worker and three give the same report, of real numbers with an error."""
    inputs = LAYER.floats()
    wrong = LAYER.expected(inputs)
    wrong[1, 2, 0, 1] += 1
    reports = []
    with running_service("--workers", "3") as several:
        for url in (tight.url, several.url):
            with convgrad.Client(url) as client:
                reports.append(client.verify(LAYER.op, inputs, wrong, LAYER.attributes()).data)
    for report in reports:
        del report["stats"]
    assert reports[0] == reports[1]
    assert reports[0]["worst"]["index"] == [1, 2, 0, 1]


def test_the_command(service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`convgrad verify` prints the report, draws it, writes JUnit, and exits with 1 if one bit of integers is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", service.url)
    inputs = LAYER.inputs()
    result = LAYER.expected(inputs)
    np.save("right.npy", result)
    result[1, 2, 0, 1] = np.nextafter(result[1, 2, 0, 1], np.float32(np.inf))
    np.save("wrong.npy", result)
    call = ["verify", *command(LAYER, inputs), "--explain"]
    assert main([*call, "--result", "right.npy"]) == 0
    assert "passed" in capsys.readouterr().out
    assert main([*call, "--result", "wrong.npy", "--png", "out.png", "--junit", "out.xml"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED, exact: 1 of 432 elements whose sums are exact have wrong bits" in printed
    assert "the one wrong element has dst channel = 1, src channel = 2, tap y = 0 and tap x = 1" in printed
    assert Path("out.png").stat().st_size > 10_000
    assert ET.parse("out.xml").getroot().get("failures") == "1"


def test_explanations(http: httpx.Client) -> None:
    """`options.explain` tests hypotheses also about a result that passes."""
    inputs = LAYER.floats()
    body = document(LAYER, {**inputs, "diff_weights": LAYER.expected(inputs)})
    report = http.post(f"/v1/ops/{LAYER.op}/verify", json={**body, "options": {"explain": True}}).json()
    assert (report["passed"], report["causes"], report["where"]) == (True, [], None)
    assert [rule["rule"] for rule in report["rules"]] == ["exact", "mean_square", "largest", "hypotheses"]
    VerifyReply.model_validate(report)


def test_fast_verification(client: convgrad.Client) -> None:
    """With `fast` projections judge the result, and one dst channel is checked in full, the one that is wrong."""
    case = replace(LAYER, n=4, src_channels=48, dst_channels=64)
    inputs = case.floats()
    result = case.expected(inputs)
    report = client.verify(case.op, inputs, result, case.attributes(), fast=True)
    assert report.passed
    assert report.data["projections"]["count"] == 16
    VerifyReply.model_validate(report.data)
    result[40, 3] *= np.float32(1.01)
    report = client.verify(case.op, inputs, result, case.attributes(), fast=True)
    assert not report.passed
    assert "FAILED, 16 random projections of the whole result" in report.text()
    assert report.data["where"]["text"].startswith("all 9 wrong elements have dst channel = 40 and src channel = 3")
    assert client.verify(case.op, inputs, result, case.attributes(), fast=False).data.get("projections") is None


@pytest.mark.heavy
def test_fast_verification_beyond_the_limit_of_work() -> None:
    """A layer whose reference would take too long is verified by projections, unless that is refused."""
    case = replace(LAYER, n=4, src_channels=48, dst_channels=64)
    inputs = case.inputs()
    result = case.expected(inputs)
    with (
        running_service("--workers", "1", CONVGRAD_WORK_LIMIT=str(case.macs)) as service,
        convgrad.Client(service.url) as client,
    ):
        assert client.validate(case.op, inputs, case.attributes())["plan"]["verify"]["fast"] is True
        report = client.verify(case.op, inputs, result, case.attributes())
        assert report.passed
        assert report.data["projections"]["exact"] is not False
        with pytest.raises(convgrad.TooLarge, match="multiply-adds"):
            client.verify(case.op, inputs, result, case.attributes(), fast=False)


@pytest.mark.parametrize("fast", [False, True])
def test_a_declared_arithmetic(client: convgrad.Client, fast: bool) -> None:
    """A result of TF32 products passes as that, by the client and the command alike, and says what else it is."""
    case = replace(LAYER, n=8, src_channels=32, dst_channels=32)
    inputs = case.floats()
    cut = {name: (tensor.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for name, tensor in inputs.items()}
    result = case.expected(cut)
    more: Any = {"fast": fast}
    assert not client.verify(case.op, inputs, result, case.attributes(), **more).passed
    report = client.verify(case.op, inputs, result, case.attributes(), arithmetic={"products": "tf32"}, **more)
    assert report.passed
    assert report.data["arithmetic"]["read"] == ["TF32, truncated", "TF32, truncated"]
    assert "passed as declared: TF32 products, f32 sums; as plain f32 it fails" in report.text()
    VerifyReply.model_validate(report.data)
    with pytest.raises(convgrad.InvalidParams, match="products must be"):
        client.verify(case.op, inputs, result, case.attributes(), arithmetic={"products": "int8"}, **more)
