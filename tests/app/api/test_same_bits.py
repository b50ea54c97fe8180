"""The same bits on every API, in every form: the oracle's, with every option that chooses how a call is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import convgrad
from convgrad._cli import main
from kernels.registry import compute
from kernels.target import target
from tests.app import oip
from tests.app.everywhere import command, everywhere
from tests.app.samples import CASES, SMALL, document, parts, same_bits
from tests.kernels.harness import problem_of, stored
from tests.live import LiveService
from tests.naive import DTYPES
from tests.problems import OPS, Case, random_case

WIDE = replace(SMALL, dtype="f64")
UNEVEN = replace(SMALL, n=8)
WINOGRAD = Case(
    n=2, src_channels=16, dst_channels=20, src_spatial=(9, 7), dst_spatial=(7, 5), kernel=(3, 3),
)  # fmt: skip
URL = f"/v1/ops/{SMALL.op}"


def check(found: dict[str, Any], right: Any) -> None:
    """Compare what each API gave with the right result."""
    assert [api for api, array in found.items() if not same_bits(array, right)] == []


@pytest.mark.parametrize("op", OPS)
def test_random_calls_have_the_oracles_bits(service: LiveService, op: str) -> None:
    """Random problems of every operation and dtype, and an empty batch, give the oracle's result everywhere."""
    rng, cases = np.random.default_rng(OPS.index(op)), [replace(CASES[op], n=0)]
    while len(cases) < 5:
        case = random_case(rng)
        cases += [case] if case.op == op else []
    for case in cases:
        inputs = case.inputs()
        check(everywhere(service, case, inputs), case.expected(inputs))


@pytest.mark.parametrize("op", OPS)
def test_f64(service: LiveService, op: str) -> None:
    """With `reference` every operation returns the oracle's bits of integers that f32 could not hold; it verifies."""
    rng = np.random.default_rng(64)
    case, right = WIDE, np.zeros(1)
    while case.op != op or (right.astype(np.float32) == right).all():
        case = replace(random_case(rng), dtype="f64")
        inputs = case.inputs()
        right = case.expected(inputs)
    check(everywhere(service, case, inputs, reference=True), right)
    with convgrad.Client(service.url) as client:
        report = client.verify(op, inputs, right, case.attributes())
        assert (report.passed, report.equal, report.data["dtype"]) == (True, True, "f64")
        right.reshape(-1)[0] = np.nextafter(right.reshape(-1)[0], np.inf)
        assert not client.verify(op, inputs, right, case.attributes()).equal


def test_f64_needs_the_option(http: httpx.Client) -> None:
    """Without `reference` f64 is unsupported on every API, and the error says what to do; so are mixtures with f32."""
    inputs = WIDE.inputs()
    described = {name: {"dtype": "f64", "shape": list(array.shape)} for name, array in inputs.items()}
    call = document(WIDE, inputs)
    replies = [
        (422, http.post(URL, files=parts(WIDE, inputs))),
        (422, http.post(URL, json=call)),
        (422, http.post(f"{URL}/validate", json=call | {"inputs": described})),
        (200, http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": WIDE.op, "params": call})),
        (400, oip.post_binary(http, WIDE, inputs)),
        (400, oip.post_json(http, WIDE, inputs)),
    ]
    for status, reply in replies:
        assert (reply.status_code, "set options.reference" in reply.text) == (status, True), reply.text
    assert '"code":-32004' in replies[3][1].text
    mixed = inputs | {"src": inputs["src"].astype(np.float32)}
    assert http.post(URL, files=parts(replace(SMALL, dtype="f32"), mixed)).status_code == 422
    wrong = document(SMALL, SMALL.inputs())
    wrong["inputs"] |= document(WIDE, {"diff_weights": WIDE.expected(inputs)})["inputs"]
    (error,) = http.post(f"{URL}/verify", json=wrong).json()["errors"]
    assert error["loc"] == ["inputs", "diff_weights", "dtype"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reproducible(service: LiveService, dtype: str) -> None:
    """With `reproducible` every API returns the reference kernel's bits, which are other ones; so `validate` says."""
    case = replace(UNEVEN, dtype=dtype)
    inputs = case.floats()
    reference, direct = (
        compute(problem_of(case), *map(stored, inputs.values()), reference=each).view(DTYPES[dtype])
        for each in (True, dtype == "f64")
    )
    assert same_bits(reference, direct) == (dtype != "f32")
    check(everywhere(service, case, inputs, reproducible=True), reference)
    with convgrad.Client(service.url) as client:
        call = case.op, inputs, case.attributes()
        assert client.run_detailed(*call, reproducible=True).stats["kernel"] == "reference_f64"
        for told in (client.validate(*call, reproducible=True), client.validate(*call, reference=True)):
            assert (told["plan"]["kernel"], told["plan"]["reproducible"]) == ("reference_f64", True)
        if dtype == "f32":
            assert client.validate(*call)["plan"]["reproducible"] is False


@pytest.mark.parametrize(
    ("path", "options", "loc"),
    [
        (URL, {"reproducible": "yes"}, ["options", "reproducible"]),
        (URL, {"reproducible": True, "algorithm": "winograd"}, ["options", "algorithm"]),
        (URL, {"reference": True, "algorithm": "winograd"}, ["options", "algorithm"]),
        (f"{URL}/verify", {"reproducible": True}, ["options", "reproducible"]),
    ],
)
def test_options_that_exclude_each_other(
    http: httpx.Client, path: str, options: dict[str, Any], loc: list[str]
) -> None:
    """Both options exclude Winograd's algorithm, and have no effect on a verification."""
    reply = http.post(path, json=document(SMALL, SMALL.inputs(), **options))
    assert reply.status_code == 422
    assert [error["loc"] for error in reply.json()["errors"]] == [loc]


COMMANDS: list[tuple[Case, dict[str, Any], list[str]]] = [
    (WIDE, {"reference": True}, ["--reference"]),
    (UNEVEN, {"reproducible": True}, ["--reproducible"]),
    (WINOGRAD, {"algorithm": "auto"}, ["--algorithm", "auto"]),
]
if target().compiles:
    COMMANDS.append((WINOGRAD, {"algorithm": "winograd"}, ["--algorithm", "winograd"]))


@pytest.mark.parametrize(("case", "options", "flags"), COMMANDS)
def test_the_command(
    service: LiveService,
    client: convgrad.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    options: dict[str, Any],
    flags: list[str],
) -> None:
    """`convgrad run` reads and writes .npy files, of float64 too, and has a flag for each option."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVGRAD_URL", service.url)
    inputs = case.floats()
    assert main(["run", *command(case, inputs), "-o", "dw.npy", *flags]) == 0
    assert same_bits(np.load("dw.npy"), client.run(case.op, inputs, case.attributes(), **options))
