"""The `/v1` API of the real service: every form of a call, every form of a reply."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.app.everywhere import FORMS
from tests.app.samples import (
    FRAMES,
    NPY,
    SMALL,
    SSE,
    Array,
    frames,
    messages,
    parts,
    post,
    read,
    request_object,
    same_bits,
)
from tests.live import LiveService
from tests.problems import Case, random_case

LARGE = Case(
    src_channels=640, dst_channels=1024, src_spatial=(4, 4), dst_spatial=(4, 4), kernel=(3, 3), pads_begin=(1, 1),
    pads_end=(1, 1),
)  # fmt: skip


@pytest.mark.parametrize("accept", FORMS)
def test_a_large_output_arrives_whole(http: httpx.Client, accept: str) -> None:
    """An output of more than twenty megabytes is the same in every form."""
    inputs = LARGE.inputs()
    assert same_bits(read(post(http, LARGE, inputs, accept)), LARGE.expected(inputs))


def test_the_reply_speaks_the_dialect_of_the_name_called(http: httpx.Client) -> None:
    """Under the old name the output is filter_delta and the attributes have their old names."""
    inputs = SMALL.inputs()
    request = request_object(SMALL)
    files = parts(SMALL, inputs)
    response = http.post("/v1/ops/ConvTransposeBackpropFilters-1", files=files)
    reply = response.json()
    assert reply["op"] == "ConvTransposeBackpropFilters-1"
    assert list(reply["outputs"]) == ["filter_delta"]
    assert reply["resolved"]["filter_format"] == request["attributes"]["weights_format"]
    assert reply["resolved"]["groups_axis"] == "O"


def test_stats_say_what_was_done(http: httpx.Client) -> None:
    """A reply has the kernel's name, the algorithm, the work, the time and the number of tiles."""
    stats = post(http, SMALL, SMALL.inputs()).json()["stats"]
    assert set(stats) == {"kernel", "algorithm", "gmac", "compute_ms", "tiles"}
    assert stats["gmac"] == pytest.approx(SMALL.macs / 1e9)


def test_progress_comes_before_tiles_and_the_response_last(http: httpx.Client) -> None:
    """An event stream has progress, tiles, and finally the response with a checksum."""
    response = post(http, SMALL, SMALL.inputs(), SSE)
    *notifications, last = messages(response.text)
    methods = [entry["method"] for entry in notifications]
    assert methods[0] == "notifications/progress"
    assert methods.index("notifications/progress") < methods.index("notifications/tile")
    steps = [entry["params"] for entry in notifications if entry["method"] == "notifications/progress"]
    assert [step["progress"] for step in steps] == sorted({step["progress"] for step in steps})
    assert steps[-1]["progress"] == steps[-1]["total"]
    assert last["id"] == response.headers["x-request-id"]
    assert set(last["result"]["outputs"]["diff_weights"]) == {"dtype", "shape", "sha256"}


def test_frames_come_in_order(http: httpx.Client) -> None:
    """A tensor stream starts with a `begin` frame, ends with an `end` frame, and numbers its tiles."""
    headers = [header for header, _ in frames(post(http, LARGE, LARGE.inputs(), FRAMES).content)]
    assert headers[0]["type"] == "begin"
    assert headers[1] == {"type": "progress", "done": 0, "total": headers[1]["total"]}
    assert headers[-1]["type"] == "end"
    tiles = [header["seq"] for header in headers if header["type"] == "tile"]
    assert tiles == list(range(headers[0]["tiles"]))


def test_concurrent_calls_do_not_mix(http: httpx.Client) -> None:
    """Calls that run at the same time each get their own result."""
    rng = np.random.default_rng(11)
    cases = [random_case(rng, macs=400_000) for _ in range(24)]

    def run(case: Case) -> tuple[Array, Array]:
        inputs = case.inputs()
        return read(post(http, case, inputs, FORMS[case.seed % len(FORMS)])), case.expected(inputs)

    with ThreadPoolExecutor(8) as pool:
        for got, expected in pool.map(run, cases):
            assert same_bits(got, expected)


def test_a_request_id_is_echoed(http: httpx.Client) -> None:
    """A valid X-Request-ID is returned; any other is replaced."""
    kept = http.get("/healthz", headers={"x-request-id": "trace-1/abc"})
    assert kept.headers["x-request-id"] == "trace-1/abc"
    for bad in ("x" * 129, "has space", 'quote"'):
        assert http.get("/healthz", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_server_timing_has_every_part(http: httpx.Client) -> None:
    """A complete reply has the times for receiving, decoding, queueing, computing and encoding."""
    timing = post(http, SMALL, SMALL.inputs()).headers["server-timing"]
    parts_named = [entry.split(";")[0] for entry in timing.split(", ")]
    assert parts_named == ["receive", "decode", "queue", "compute", "encode"]


def test_curl_with_two_files_writes_a_file(service: LiveService, tmp_path: Path) -> None:
    """curl --form with two .npy files and Accept: application/x-npy writes a file that numpy.load reads."""
    inputs, out = SMALL.inputs(), tmp_path / "dw.npy"
    (tmp_path / "request.json").write_text(json.dumps(request_object(SMALL)))
    fields = ["--form", f"request=@{tmp_path}/request.json;type=application/json"]
    for name, array in inputs.items():
        np.save(tmp_path / f"{name}.npy", array)
        fields += ["--form", f"{name}=@{tmp_path}/{name}.npy"]
    command = ["curl", "-sS", "--fail", *fields, "-H", f"Accept: {NPY}", "-o", str(out)]
    subprocess.run([*command, f"{service.url}/v1/ops/{SMALL.op}"], check=True, capture_output=True)
    assert same_bits(np.load(out), SMALL.expected(inputs))
