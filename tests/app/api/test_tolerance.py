"""Tolerances on every API, by the client and by the command, and the files that tests of others include."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import convgrad
from convgrad._cli import main
from convgrad._graphs import tensors_of
from schemas.wire import ToleranceReply
from tests.app.everywhere import command
from tests.app.samples import SMALL, document, read_tensor
from tests.live import LiveService
from tests.verify.kernels import DATA, LAYER, honest, mutants, products

CXX = shutil.which("g++")
INPUTS = DATA[0](np.random.default_rng(0))
PATH = f"/v1/ops/{LAYER.op}/tolerance"

# A test as with gtest: EXPECT_NEAR compares doubles in this way.
TEST = r"""
#include "layer.h"
#include <cmath>
#include <cstdio>
#include <vector>

int main(int count, char **files) {
    for (int at = 1; at < count; ++at) {
        std::vector<float> actual(layer_count);
        std::FILE *file = std::fopen(files[at], "rb");
        if (!file || std::fread(actual.data(), 4, layer_count, file) != layer_count) return 2;
        std::fclose(file);
        int near = 0, holds = 0, pair = 0;
        for (std::size_t i = 0; i < layer_count; ++i) {
            const double off = std::fabs(double(actual[i]) - double(layer_reference[i]));
            near += off <= layer_tolerance[i];
            holds += layer_holds(i, actual[i]);
            pair += off <= layer_atol + layer_rtol * std::fabs(layer_reference[i]);
        }
        std::printf("%d %d %d\n", near, holds, pair);
    }
    return layer_detection_limit < 1 ? 0 : 3;
}
"""


def test_every_api_and_client(client: convgrad.Client, http: httpx.Client, service: LiveService) -> None:
    """REST in JSON and multipart, JSON-RPC, and the clients, here and of the service, give the same."""
    found = client.tolerance(LAYER.op, INPUTS, LAYER.attributes())
    body = document(LAYER, INPUTS)
    rest = http.post(PATH, json=body).json()
    params = {"jsonrpc": "2.0", "id": 1, "method": "ops.tolerance", "params": {"op": LAYER.op, **body}}
    parts = http.post(PATH, json=body, headers={"accept": "multipart/form-data"})
    _, tensors = tensors_of(parts.headers["content-type"], parts.content, "outputs")

    async def awaited() -> convgrad.Tolerance:
        async with convgrad.AsyncClient(service.url) as other:
            return await other.tolerance(LAYER.op, INPUTS, LAYER.attributes())

    others = [convgrad.local(progress=False).tolerance(LAYER.op, INPUTS, LAYER.attributes()), asyncio.run(awaited())]
    for reply in (rest, http.post("/rpc", json=params).json()["result"]):
        ToleranceReply.model_validate(reply)
        others.append(convgrad.Tolerance.of(reply))
    others.append(convgrad.Tolerance(others[0].data, tensors["reference"], tensors["tolerance"]))
    for other in others:
        assert {**other.data, "stats": 0} == {**found.data, "stats": 0}
        np.testing.assert_array_equal(other.reference, found.reference)
        np.testing.assert_array_equal(other.tolerance, found.tolerance)
    assert read_tensor(rest["outputs"]["reference"]).shape == LAYER.output_shape
    assert 0 < found.atol < 1e-3
    assert f"atol={found.atol!r}, rtol={found.rtol!r} contain every honest result" in found.text()
    assert "one missing product of 192" in found.text()


def test_other_outputs_and_data(client: convgrad.Client) -> None:
    """Any output has a tolerance; f64 is measured in f64; NaN and Inf are said where they are expected."""
    bias = client.tolerance(LAYER.op, INPUTS, LAYER.attributes(), output="diff_bias")
    assert bias.contains(INPUTS["diff_dst"].sum((0, 2, 3))).all()
    wide = client.tolerance(LAYER.op, {k: v.astype(np.float64) for k, v in INPUTS.items()}, LAYER.attributes())
    assert wide.reference.dtype == wide.tolerance.dtype == np.float64
    assert 0 < wide.tolerance.max() < 1e-12
    src = INPUTS["src"].copy()
    src[0, 0, 4, 4] = np.nan
    odd = client.tolerance(LAYER.op, INPUTS | {"src": src}, LAYER.attributes())
    assert "expected: 27 NaN and 0 Inf, the first at [0, 0, 0, 0]" in odd.text()
    assert odd.contains(odd.reference).all()
    assert not odd.contains(np.nan_to_num(odd.reference))[:, 0].any()


@pytest.mark.parametrize(
    ("options", "loc"),
    [
        ({"fast": True}, ["options", "fast"]), ({"explain": True}, ["options", "explain"]),
        ({"reference": True}, ["options", "reference"]),
        ({"outputs": ["diff_weights", "diff_bias"]}, ["options", "outputs"]),
        ({"arithmetic": {"products": "int8"}}, ["options", "arithmetic", "products"]),
        ({"arithmetic": {"algorithm": "winograd F(2, 5)"}}, ["options", "arithmetic", "algorithm"]),
    ],
)  # fmt: skip
def test_options_that_mean_nothing(http: httpx.Client, options: dict[str, Any], loc: list[str]) -> None:
    """Options without effect are refused, and declarations that mean nothing for the operation."""
    reply = http.post(PATH, json={**document(LAYER, INPUTS), "options": options})
    assert (reply.status_code, reply.json()["errors"][0]["loc"]) == (422, loc)


def test_a_result_is_no_input(http: httpx.Client) -> None:
    """A result among the inputs is an unknown input: there is nothing to judge."""
    inputs = SMALL.inputs()
    sent = document(SMALL, {**inputs, "diff_weights": SMALL.expected(inputs)})
    assert http.post(f"/v1/ops/{SMALL.op}/tolerance", json=sent).status_code == 422


@pytest.fixture
def folder(service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Path:
    """A folder with the three files that `convgrad tolerance` wrote, and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", service.url)
    files = [part for name in ("layer.npz", "layer.json", "layer.h") for part in ("-o", name)]
    assert main(["tolerance", *command(LAYER, INPUTS), *files]) == 0
    (tmp_path / "printed").write_text(capsys.readouterr().out)
    return tmp_path


def test_the_files(folder: Path) -> None:
    """The archive and the JSON have the same numbers, and a plain test of NumPy passes honest kernels, no mutant."""
    assert "in the hardest order that kernels add in" in (folder / "printed").read_text()
    told = json.loads((folder / "layer.json").read_text())
    with np.load(folder / "layer.npz") as saved:
        kept = dict(saved)
    for name in ("reference", "tolerance"):
        np.testing.assert_array_equal(np.array(told[name], np.float32), kept[name].reshape(-1))
    assert (told["atol"], told["rtol"]) == (kept["atol"], kept["rtol"])
    assert json.loads(str(kept["problem"]))["resolved"]["strides"] == [1, 1]
    assert kept["detection_limit"] == told["detection"]["one_element"]
    pair: Any = {"rtol": float(kept["rtol"]), "atol": float(kept["atol"])}
    for _, result in honest(INPUTS, products(INPUTS)):
        np.testing.assert_allclose(result, kept["reference"], **pair)
        assert np.isclose(result, kept["reference"], rtol=0, atol=kept["tolerance"]).all()
    for name, result in mutants(INPUTS):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(result.astype(np.float32), kept["reference"], **pair, err_msg=name)


@pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")
def test_the_header_in_a_cpp_test(folder: Path) -> None:
    """The header compiles without a warning; honest kernels are near in every element, no mutant is."""
    (folder / "test.cpp").write_text(TEST)
    flags = ["-std=c++11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run([str(CXX), *flags, "test.cpp", "-o", "test"], cwd=folder, check=True)
    right, wrong = (dict(honest(INPUTS, products(INPUTS))), dict(mutants(INPUTS)))
    for name, result in (right | wrong).items():
        result.astype(np.float32).tofile(folder / name.replace(" ", "_"))
    names = [name.replace(" ", "_") for name in right | wrong]
    done = subprocess.run(["./test", *names], cwd=folder, capture_output=True, text=True, check=True)
    counts = dict(zip(right | wrong, (tuple(map(int, line.split())) for line in done.stdout.splitlines()), strict=True))
    size = int(np.prod(LAYER.output_shape))
    assert {name for name, found in counts.items() if found == (size,) * 3} == set(right)
    assert {name for name, found in counts.items() if max(found) == size} == set(right)


def test_the_header_of_what_is_not_finite(client: convgrad.Client, tmp_path: Path) -> None:
    """NaN and Inf are written by their names, any file's name becomes one of C, and other suffixes are refused."""
    src = INPUTS["src"].copy()
    src[0, 0, 4, 4], src[0, 1, 4, 4] = np.nan, -np.inf
    found = client.tolerance(LAYER.op, INPUTS | {"src": src}, LAYER.attributes())
    found.save(tmp_path / "2 x.h")
    text = (tmp_path / "2 x.h").read_text()
    assert "static const float _2_x_reference[] = {" in text
    assert "NAN, " in text
    assert "-INFINITY" in text
    with pytest.raises(ValueError, match=r"ends in \.npz, \.json, \.h, not tolerance\.txt"):
        found.save(tmp_path / "tolerance.txt")


@pytest.mark.parametrize(("arguments", "said"), [(["-o", "x.txt"], "-o must be a file that ends in"), ([], None)])
def test_the_command(
    folder: Path, arguments: list[str], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """A declared arithmetic loosens the tolerance; a file of another kind is refused before anything is computed."""
    plain = json.loads((folder / "layer.json").read_text())
    call = ["tolerance", *command(LAYER, INPUTS), "--json", "--arithmetic", "products=tf32", *arguments]
    assert main(call) == (0 if said is None else 2)
    out, error = capsys.readouterr()
    if said:
        assert said in error
    else:
        assert json.loads(out)["atol"] > 10 * plain["atol"]
