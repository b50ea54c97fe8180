"""Code that fails on this processor is detected before a call is accepted, and the next narrower path is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from kernels.emit.cache import VERDICT, cache_folder, pack
from kernels.target import NAME, narrower, target
from tests.app.samples import NPY, post, read, same_bits
from tests.live import LiveService, running_service
from tests.problems import random_case

# Python imports a module of this name first. It puts a fault into one tile of a micro-kernel of one target.
HOOK = """
import os
from llvmlite import ir
from kernels.emit.brgemm import _Tile
from kernels.target import target

right = _Tile.emit

def emit(tile):
    if (tile.kind, tile.rows, tile.vectors) != ("f32", 3, 2) or str(target()) != os.environ["FAULTY"]:
        return right(tile)
    builder, fault = tile.builder, os.environ["FAULT"]
    if fault == "crashes":
        long = ir.IntType(64)
        builder.store(long(0), builder.inttoptr(long(8), long.as_pointer()))
    if fault == "can't be compiled":
        lanes, long = ir.VectorType(ir.FloatType(), 4), ir.IntType(64)  # of an instruction that AMD gave up
        function = ir.Function(builder.module, ir.FunctionType(lanes, [lanes]), "llvm.x86.xop.vfrcz.ps")
        place = builder.inttoptr(long(8), lanes.as_pointer())
        builder.store(builder.call(function, [builder.load(place)]), place)
    return []

_Tile.emit = emit
"""

NARROWER = narrower(target())


@pytest.fixture(scope="module")
def folders(service: LiveService) -> list[Path]:
    """The folders of this target's compiled code, and of the next narrower one's."""
    assert service.url
    script = "from kernels.emit.cache import cache_folder; print(cache_folder())"
    environment = {**os.environ, NAME: NARROWER.name}
    subprocess.run([sys.executable, "-m", "kernels.prepare"], env=environment, check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    return [Path(cache_folder()), Path(done.stdout.strip())]


def _with_fault(folders: list[Path], tmp_path: Path, fault: str) -> dict[str, str]:
    """Copy the compiled code without one tile; return settings under which that one is compiled with a fault."""
    cache = tmp_path / "cache"
    for folder in folders:
        shutil.copytree(folder, cache / folder.name)
    mine = cache / folders[0].name
    (mine / VERDICT).unlink()
    for file in mine.rglob("*_batch_f32_2-*"):
        file.unlink()
    (tmp_path / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    return {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(cache), "FAULT": fault, "FAULTY": str(target())}


@pytest.mark.heavy
@pytest.mark.skipif(target().arch != "x86_64" or not NARROWER.compiles, reason="the fault is one of x86")
@pytest.mark.parametrize(
    "fault", ["is wrong", *(pytest.param(each, marks=pytest.mark.release) for each in ("crashes", "can't be compiled"))]
)
def test_a_faulty_path_is_taken_out(folders: list[Path], tmp_path: Path, fault: str) -> None:
    """The service starts with the next narrower target, says so in log, /readyz and metrics, and computes right."""
    _check_that_the_narrower_path_serves(_with_fault(folders, tmp_path, fault), fault)


@pytest.mark.release
@pytest.mark.skipif(target().arch != "x86_64" or not NARROWER.compiles, reason="the fault is one of x86")
def test_a_faulty_archive_is_taken_out(folders: list[Path], tmp_path: Path) -> None:
    """Code that comes with an image is tested as well, although nothing is compiled."""
    settings = _with_fault(folders, tmp_path, fault := "crashes")
    script = "from kernels import warmup; list(warmup())"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **settings}, check=True)
    cache = Path(settings["NUMBA_CACHE_DIR"])
    pack(str(cache / folders[0].name))
    _check_that_the_narrower_path_serves({"NUMBA_CACHE_DIR": str(cache)}, fault)


def _check_that_the_narrower_path_serves(settings: dict[str, str], fault: str) -> None:
    running = running_service("--workers", "1", **settings)  # type: ignore[arg-type]
    with running as service, httpx.Client(base_url=service.url, timeout=60) as http:
        page = http.get("/readyz").json()
        assert (page["status"], page["target"]) == ("ready", NARROWER.name)
        (reason,) = page["unfit"]
        assert reason.startswith(f"{target()}: ")
        assert fault in reason
        assert "3" in reason
        assert any(reason.partition(": ")[2] in line and "ERROR" in line for line in service.log)
        assert "convgrad_targets_unfit 1.0" in http.get("/metrics").text
        rng = np.random.default_rng(7)
        for _ in range(60):
            case = random_case(rng, macs=20_000)
            inputs = case.inputs()
            assert same_bits(read(post(http, case, inputs, NPY)), case.expected(inputs)), case


@pytest.mark.heavy
def test_without_compiled_code_small_calls_are_computed() -> None:
    """The reference, which needs no compiled code, computes small calls; large ones are rejected with advice."""
    running = running_service("--workers", "1", **{NAME: "reference"})  # type: ignore[arg-type]
    with running as service, httpx.Client(base_url=service.url, timeout=60) as http:
        assert http.get("/readyz").json()["target"] == "reference"
        rng = np.random.default_rng(8)
        for _ in range(10):
            case = random_case(rng, macs=20_000)
            inputs = case.inputs()
            assert same_bits(read(post(http, case, inputs, NPY)), case.expected(inputs)), case
        ones, attributes = [1, 1], {"weights_shape": [3, 3, 512, 512], "data_format": "NCX", "weights_format": "XIO"}
        attributes |= dict.fromkeys(("strides", "pads_begin", "pads_end", "dilations"), ones)
        tensor = {"dtype": "f32", "shape": [8, 512, 64, 64]}
        call = {"attributes": attributes, "inputs": {"src": tensor, "diff_dst": tensor}}
        refused = http.post("/v1/ops/ConvolutionBackwardWeights/validate", json=call)
        assert refused.status_code == 413, refused.text
        assert "no compiled code works" in refused.text
