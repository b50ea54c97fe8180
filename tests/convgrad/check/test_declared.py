"""Kernels that declare their arithmetic to `convgrad check`, and to sealed checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import convgrad
from convgrad import Client
from convgrad._check.judge import as_read
from convgrad._check.page import page
from convgrad._check.report import counts, junit, load, text
from convgrad._cli import main
from tests.convgrad.check.checking import KERNELS, checked
from tests.convgrad.check.kernels import tf32_inputs
from tests.live import LiveService
from verify.arithmetic import PRODUCTS

TF32 = {"products": "tf32"}
SCHEMA = Path(__file__).parents[3] / "docs" / "check-report.schema.json"


def test_a_kernel_passes_as_what_it_declares(service: LiveService) -> None:
    """A TF32 kernel passes as such; the report says so in every form."""
    data = checked("tf32_inputs", service.url, cases=60, arithmetic=TF32)
    assert counts(data) == {"passed": 60, "failed": 0, "unsupported": 0}, data["faults"]
    said = "declared: products=tf32; cases judged: 60 by that"
    assert said in text(data, {})
    assert said in page(data)
    assert said in junit(data)
    jsonschema.validate(json.loads(json.dumps(data)), json.loads(SCHEMA.read_text(encoding="utf-8")))


@pytest.mark.heavy
def test_a_declaration_hides_no_fault(service: LiveService, tmp_path: Path) -> None:
    """A TF32 kernel that leaves out an image fails; its script shows that with it, and not with one that does not."""
    data = checked("tf32_last_image", service.url, cases=30, arithmetic=TF32, only=["normal"])
    (fault,) = data["faults"]
    assert fault["kind"] == "wrong"
    script = fault["reproducer"]
    assert "Judged as declared: products=tf32" in script
    codes = []
    for kernel in ("tf32_last_image", "tf32_inputs"):
        path = tmp_path / f"{kernel}.py"
        path.write_text(script.replace("'tf32_last_image'", repr(kernel)), encoding="utf-8")
        codes.append(subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, check=False).returncode)
    assert codes == [1, 0]


def test_another_precision_than_declared_fails(service: LiveService) -> None:
    """A kernel that adds images in bf16 is no TF32 kernel."""
    assert counts(checked("bf16_sums", service.url, cases=30, arithmetic=TF32, shrinking=0.1))["failed"]


def test_cases_that_a_declaration_does_not_fit_are_plain(service: LiveService) -> None:
    """Winograd's algorithm is for some kernels and no strides: elsewhere sums are judged as direct ones."""
    said = {"algorithm": "winograd F(4, 3)", "sum": "f32"}
    data = checked("right", service.url, cases=60, arithmetic=said)
    assert counts(data)["passed"] == 60
    sizes = {len(entry["arithmetic"]) for entry in data["cases"]}
    assert sizes == {1, 2}
    assert "by the part of it that applies" in text(data, {})


@pytest.mark.parametrize("products", [name for name, each in PRODUCTS.items() if each.readings])
def test_inputs_are_read_as_the_report_names_it(products: str) -> None:
    """Scripts round their inputs as the judge does."""
    values = np.random.default_rng(0).standard_normal(4096, dtype=np.float32)
    values[:5] = np.nan, np.inf, 1 + 2.0**-11, 2.0**-149, 2.0**-130  # halfway in TF32; subnormal
    for reading in PRODUCTS[products].readings:
        finite = values[2:]
        assert np.array_equal(as_read(values, reading.name)[2:], reading.rounding(finite.astype(np.float64)))
    assert np.array_equal(as_read(values, None), values, equal_nan=True)


def test_the_command(service: LiveService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--arithmetic` is kept by the report, and refused where it means nothing."""
    kernel, path = f"{KERNELS}:tf32_inputs", str(tmp_path / "a.json")
    common = ["--url", service.url, "--cases", "8", "--only", "normal", "-q"]
    assert main(["check", kernel, "--arithmetic", "products=tf32", "--report", path, *common]) == 0
    assert main(["check", "--resume", path, "--report", path, *common]) == 0
    assert [entry["arithmetic"] for entry in load(path)["cases"]] == [TF32] * 16
    for wrong, message in (
        (["--arithmetic", "products=fp8"], "--arithmetic products must be f32 or tf32"),
        (["--arithmetic", "algorithm=winograd"], "such as winograd F(4, 3)"),
        (["--arithmetic", "tf32"], "--arithmetic must be NAME=VALUE"),
        (["--arithmetic", "products=tf32", "--dtypes", "bf16"], "must be f32 for ConvolutionBackwardWeights in bf16"),
        (["--arithmetic", "products=bf16", "--resume", path], "--arithmetic is for a new check"),
    ):
        assert main(["check", kernel, *wrong, *common]) == 2
        assert message in capsys.readouterr().err


def sealed(client: Client, arithmetic: Any) -> dict[str, Any]:
    """Return the document of a sealed check of a TF32 kernel."""
    takes = {"ops": ["ConvolutionBackwardWeights"], "dtypes": ["f32", "bf16"], "weights_formats": ["OIX"]}
    takes["data_formats"] = ["NCX"]
    check = client.begin_check(takes, cases=24, arithmetic=arithmetic)
    while (case := client.next_case(check)) is not None:
        if case.dtype == "bf16":
            client.submit_result(case, client.run(case.op, case.inputs, case.attributes))
            continue
        given = {name: tuple(value) for name, value in case.attributes.items() if isinstance(value, list)}
        names = ("weights_shape", "strides", "dilations", "pads_begin")
        given = {name: given[name] for name in names} | {"groups": case.attributes["groups"]}
        client.submit_result(case, tf32_inputs(**case.inputs, **given))
    return client.finish_check(check)


def test_a_sealed_check_says_as_what_it_passed(live: Client) -> None:
    """The declaration is signed, with what of it each case was judged by."""
    document = sealed(live, TF32)
    assert document["passed"], document["cases"]
    assert document["arithmetic"] == TF32
    cases = document["cases"]
    assert [case["arithmetic"] for case in cases] == [TF32 if case["dtype"] == "f32" else {} for case in cases]
    assert {case["dtype"] for case in cases} == {"f32", "bf16"}
    assert live.verify_signature(document)["valid"]
    assert live.verify_signature({**document, "arithmetic": {}})["reason"] == "changed"
    plain = sealed(live, None)
    assert (plain["verdict"], plain["arithmetic"]) == ("failed", {})


@pytest.mark.parametrize(
    ("arithmetic", "loc", "words"),
    [
        (["tf32"], ["arithmetic"], "must be an object"),
        ({"products": "fp8"}, ["arithmetic", "products"], "products must be f32 for BiasAdd in f32"),
        ({"algorithm": "fft"}, ["arithmetic", "algorithm"], "direct for BiasAdd"),
        ({"rounding": "up"}, ["arithmetic", "rounding"], "products, sum, segments"),
    ],
)
def test_a_sealed_check_refuses_what_means_nothing(live: Client, arithmetic: Any, loc: list[str], words: str) -> None:
    """The error says what may be declared."""
    with pytest.raises(convgrad.InvalidParams) as refused:
        live.begin_check({"ops": ["BiasAdd"], "dtypes": ["f32"]}, arithmetic=arithmetic)
    (found,) = refused.value.errors
    assert found["loc"] == loc
    assert words in found["msg"]


def test_a_sealed_check_by_the_command(
    service: LiveService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line says what was declared."""
    kernel, path = f"{KERNELS}:tf32_inputs", str(tmp_path / "sealed.json")
    common = ["check", kernel, "--sealed", service.url, "--cases", "12", "--report", path]
    assert main([*common, "--arithmetic", "products=tf32"]) == 0
    assert "passed as declared (products=tf32); 12 of 12 cases passed" in capsys.readouterr().out
    assert json.loads(Path(path).read_text(encoding="utf-8"))["arithmetic"] == TF32
