"""Measure the constants of the cost model of the engine `ray` on a running cluster.

    python -m benchmarks.cluster [--address HOST:PORT]

Prints one line for each field of `app.cluster.costs.Costs` that is measured, the medians of several rounds. Data are
sent to a node other than this one where there is one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from app.cluster.machines import submit
from app.cluster.node import check, identity
from app.cluster.node import compute as compute_unit
from app.cluster.units import arguments, portions
from kernels import ConvProblem, compute, plan

_ROUNDS = 7
_MIB = 64


def layer(images: int, channels: int, size: int) -> ConvProblem:
    """Return the weight gradient of a 3x3 convolution with equal sizes of src and dst."""
    return ConvProblem(
        op="ConvolutionBackwardWeights", dtype="f32", n=images, src_channels=channels, dst_channels=channels, groups=1,
        src_spatial=(size, size), dst_spatial=(size, size), kernel=(3, 3), strides=(1, 1), dilations=(1, 1),
        pads_begin=(1, 1), data_format="NCX", weights_format="OIX",
    )  # fmt: skip


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of some rounds, after one that does not count."""
    work()
    taken = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def inputs_of(problem: ConvProblem) -> list[np.ndarray[Any, Any]]:
    """Return random inputs."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in problem.input_shapes]


def main() -> None:
    """Measure and print."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="auto", help="the cluster's head (default: that of this machine's node)")
    path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ray.init(address=parser.parse_args().address, log_to_driver=False, runtime_env={"env_vars": path})
    mine = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != mine]
    there = others[:1] or [mine]
    ray.get(submit(check, there, identity()))

    tiny = plan(layer(2, 4, 8))
    references = [ray.put(tensor) for tensor in inputs_of(layer(2, 4, 8))]
    unit_s = seconds(lambda: ray.get(submit(compute_unit, there, *arguments(tiny, 0), *references)))

    tensor = np.ones(_MIB << 18, np.float32)
    put_s = seconds(lambda: ray.put(tensor))
    # a unit of a call whose inputs are that large, and whose work is none to speak of
    wide = ConvProblem.of_bias("BiasAddBackward", "f32", 1, 1, (tensor.size,), "NCX")
    bias = plan(wide)
    whole = tensor.reshape(wide.input_shapes[0])

    def send() -> None:
        reference = ray.put(whole)
        calls = [submit(compute_unit, there, *arguments(bias, unit.index), reference) for unit in bias.units[:1]]
        ray.get(calls)

    assert all(portion.high is None or portion.high == 1 for portion in portions(bias, bias.units[0]))
    send_s = seconds(send) - put_s - unit_s
    case = layer(16, 128, 28)
    data = inputs_of(case)
    compute_s = seconds(lambda: compute(case, *data))
    print(f"{'another node' if others else 'this node: the rate of sending means nothing'}")
    print(f"unit_s     {unit_s:.4f}")
    print(f"put_rate   {tensor.nbytes / put_s:.2g}")
    print(f"send_rate  {tensor.nbytes / send_s:.2g}")
    print(f"mac_rate   {case.macs / compute_s:.2g}")


if __name__ == "__main__":
    main()
