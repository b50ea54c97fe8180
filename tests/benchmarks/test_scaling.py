"""The simulation of a cluster: deterministic, sound at its limits, and quoted correctly in the page."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scaling import CALLS, Constants, local_time, simulate
from kernels.target import host_arch

CONSTANTS = Constants.load()
IDEAL = dataclasses.replace(
    CONSTANTS, spread=0.0, join_bytes_per_s=1e30, put_bytes_per_s=1e30, network_bytes_per_s=1e30, task_s=0.0,
    failures_per_s=0.0,
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_only_computing_takes_time_without_overheads(call: object, workers: int) -> None:
    """With a perfect network and equal shards, a cluster takes as long as one machine with as many workers."""
    chosen = next(each for each in CALLS if each == call)
    found = simulate(chosen, workers, IDEAL, np.random.default_rng(0))
    assert found == pytest.approx(local_time(chosen, workers, IDEAL))


@pytest.mark.skipif(host_arch() != "x86_64", reason="the calls are those of an x86 processor")
def test_the_calls_are_real() -> None:
    """The simulated calls are cut as the planner of a processor with AVX2 cuts these layers."""
    code = """
from benchmarks.scaling import CALLS, call_of
from kernels import ConvProblem, plan
for n, channels, size, kernel, call in zip((16, 64, 64), (64, 256, 1024), (56, 56, 32), (3, 3, 7), CALLS, strict=True):
    problem = ConvProblem(
        op="ConvolutionBackwardWeights", dtype="f32", n=n, src_channels=channels, dst_channels=channels, groups=1,
        src_spatial=(size + kernel - 1,) * 2, dst_spatial=(size, size), kernel=(kernel, kernel), strides=(1, 1),
        dilations=(1, 1), pads_begin=(0, 0), data_format="NCX", weights_format="OIX", groups_axis="O", bias=False,
    )
    assert call_of(call.name, plan(problem, workers=1000)) == call, call
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CONVGRAD_TARGET": "znver3"}, cwd=ROOT)


def test_a_lost_node_costs_its_shard_again() -> None:
    """If every shard is lost once, one node takes twice as long, and the time to notice each loss; the service none."""
    call = CALLS[0]
    lossy = dataclasses.replace(IDEAL, failures_per_s=1e9)
    found = simulate(call, 1, lossy, np.random.default_rng(0), here=0)
    assert found == pytest.approx(2 * local_time(call, 1, IDEAL) + call.shards * IDEAL.notice_s)
    assert simulate(call, 1, lossy, np.random.default_rng(0)) == pytest.approx(local_time(call, 1, IDEAL))
