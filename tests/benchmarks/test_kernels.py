"""The kernel benchmark: its data, its reference, how contenders alternate, and its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import kernels as command
from benchmarks import report
from benchmarks.accuracy import Reference, channels_last, grouped_result, make_inputs
from benchmarks.contenders import Contender, Ours
from benchmarks.layers import LAYOUTS, OPERATIONS, Layer, inside_macs, read_layers
from benchmarks.measure import TOLERANCE, Settings, take_turns
from benchmarks.padding import padding
from kernels import ConvProblem

SHAPES = Path(__file__).parent.parent.parent / "benchmarks" / "shapes.json"

ROWS: list[dict[str, Any]] = [
    {
        "name": "conv", "op": "ConvolutionBackwardWeights", "n": 9, "bench_n": 2, "src_channels": 6,
        "dst_channels": 10, "src_spatial": [12, 11], "dst_spatial": [5, 7], "kernel": [4, 3], "strides": [3, 2],
        "dilations": [1, 2], "pads_begin": [0, 2], "pads_end": [4, 4], "groups": 2,
    },
    {
        "name": "deconv", "op": "ConvTransposeBackwardWeights", "n": 2, "src_channels": 6, "dst_channels": 4,
        "src_spatial": [5], "dst_spatial": [12], "kernel": [3], "strides": [3], "dilations": [1],
        "pads_begin": [1], "pads_end": [4], "output_padding": [2], "groups": 1,
    },
]  # fmt: skip


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """A small shapes file."""
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(ROWS))
    return path


def layers() -> list[Layer]:
    """Return the small file's layers, including the forward one."""
    return [Layer("conv", OPERATIONS[0], ROWS[0]), *(Layer("deconv", op, ROWS[1]) for op in OPERATIONS[1:])]


def test_every_row_of_the_shapes_file_is_a_layer() -> None:
    """All rows obey the shape rules, and each also makes a forward problem and a gradient with respect to src."""
    rows = json.loads(SHAPES.read_text())
    found = read_layers(SHAPES, list(OPERATIONS), [])
    assert len(found) == 3 * len(rows)
    for layer in found:
        problem = layer.problem("f32", "NCX")
        assert problem.n == layer.row["bench_n"]
        assert problem.macs / 1e9 == pytest.approx(layer.row["bench_gmac"], abs=1e-6)
        assert 0 < inside_macs(problem) <= problem.macs


def test_a_row_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """A dst that does not follow from its src is rejected: the peer would compute something else."""
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps([ROWS[0] | {"dst_spatial": [5, 8]}]))
    with pytest.raises(ValueError, match="axis 1"):
        read_layers(path, list(OPERATIONS), [])


def test_symmetric_padding_is_equivalent() -> None:
    """PyTorch's own size formulas return the requested size of each axis, and zeros are added only where needed."""
    cases = 0
    for size, kernel, stride, dilation in np.ndindex(9, 4, 4, 3):
        wide, extent = size + 1, kernel * (dilation + 1) + 1
        for begin, end in np.ndindex(6, 6):
            covered = wide + begin + end - extent
            if covered < 0:
                continue
            narrow = covered // (stride + 1) + 1
            found = padding(wide, narrow, kernel + 1, stride + 1, dilation + 1, begin)
            extended = wide + found.low + found.high
            assert min(found.pads, found.low, found.high, found.left_over) >= 0
            assert found.low + found.pads == begin
            assert (extended + 2 * found.pads - extent) // (stride + 1) + 1 == narrow
            assert found.left_over <= stride
            assert stride * (narrow - 1) + narrow - 1 + extent - 2 * found.pads + found.left_over == extended
            if found.low or found.high:  # with unmodified padding the size would be wrong
                assert (wide + 2 * begin - extent) // (stride + 1) + 1 != narrow
            cases += 1
    assert cases > 1000


@pytest.mark.parametrize("layer", layers(), ids=lambda layer: layer.op)
def test_only_taps_inside_are_counted(layer: Layer) -> None:
    """The inside work equals a count over all pairs of positions."""
    problem = layer.problem("f32", "NCX")
    transposed = problem.op.startswith("ConvT")
    wide, narrow = problem.src_spatial, problem.dst_spatial
    if transposed:
        wide, narrow = narrow, wide
    pairs = 0
    for place in np.ndindex(*narrow, *problem.kernel):
        x, tap = place[: problem.rank], place[problem.rank :]
        steps = zip(x, problem.strides, tap, problem.dilations, problem.pads_begin, wide, strict=True)
        pairs += all(0 <= at * s + k * d - b < size for at, s, k, d, b, size in steps)
    channels = problem.src_channels * problem.dst_channels // problem.groups
    assert inside_macs(problem) == pairs * channels * problem.n


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("layer", layers(), ids=lambda layer: layer.op)
@pytest.mark.parametrize("threads", [1, 2])
def test_both_layouts_give_the_reference(layer: Layer, dtype: str, threads: int) -> None:
    """In either layout our result is near float64, with the elements in the same order; a spoiled result is not."""
    problem = layer.problem(dtype, "NCX")
    inputs = {"NCX": make_inputs(problem)}
    inputs["NXC"] = channels_last(problem, inputs["NCX"])
    exact = Reference(problem, inputs["NCX"])
    results = []
    for layout in LAYOUTS:
        ours = Ours(layer.problem(dtype, layout), inputs[layout], threads, "wall")
        seconds, called = ours.first()
        assert seconds > 0
        results.append(grouped_result(*ours.result(called)))
        assert ours.about()["worker_scratch_bytes"] > 0
        ours.close()
        assert exact.error(results[-1])["max"] < TOLERANCE[dtype]
    assert np.abs(results[0] - results[1]).max() < TOLERANCE[dtype] * exact.scale
    assert exact.error(results[0] + exact.scale)["rms"] == pytest.approx(1, abs=0.1)


class Clockwork(Contender):
    """A contender whose calls take a set time on its own clock."""

    def __init__(self, who: str, seconds: float, log: list[str]) -> None:
        super().__init__(who, layers()[0].problem("f32", "NCX"), "wall")
        self._seconds, self._log, self._now = seconds, log, 0.0
        self.clock = lambda: self._now

    def call(self) -> None:
        """Advance the clock."""
        self._now += self._seconds
        self._log.append(self.who)

    def result(self, called: Any) -> tuple[Any, ConvProblem]:
        """Fail: only the times are used."""
        raise AssertionError(f"a clockwork computes nothing, asked for {called!r}")


def settings(budget: float) -> Settings:
    """Return settings for three runs within `budget` seconds."""
    return Settings(dtype="f32", threads=1, peer="none", runs=3, budget=budget, clock="wall", limit=1.0)


def test_contenders_take_turns() -> None:
    """Samples alternate A B A B, and each is the mean of as many calls as the clock needs."""
    log: list[str] = []
    slow, quick = Clockwork("a", 0.02, log), Clockwork("b", 0.004, log)
    taken = take_turns({slow: 0.02, quick: 0.004}, settings(60))
    assert "".join(log) == "b" + 3 * "abbb"
    assert taken[slow]["median_s"] == pytest.approx(0.02)
    assert taken[quick]["median_s"] == pytest.approx(0.004)
    assert (taken[slow]["repeats"], taken[quick]["repeats"]) == (1, 3)


@pytest.mark.heavy
def test_the_command_writes_a_record_that_the_report_reads(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command measures a file of shapes, another writes the tables to their places."""
    out, readme, picture, table = (tmp_path / name for name in ("out.json", "README.md", "out.png", "layers.csv"))
    words = ["--shapes", str(shapes), "--peer", "none", "--runs", "1", "--ops", ",".join(OPERATIONS)]
    assert command.main([*words, "--json", str(out), "--plot", str(picture)]) == 0
    assert f"[{len(OPERATIONS)}/{len(OPERATIONS)}]" in capsys.readouterr().out
    (record,) = json.loads(out.read_text())
    assert [row["op"] for row in record["layers"]] == list(OPERATIONS)
    assert all(set(row["ours"]) == set(LAYOUTS) and row["right"] for row in record["layers"])
    assert record["limit"]["gflops"] > 0
    assert record["machine"]["versions"].keys() >= {"python", "numba", "numpy"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    readme.write_text(f"# Before\n{report.BEGIN}\nold\n{report.END}\nAfter\n")
    assert report.main([str(out), "--into", str(readme), "--layers", str(table)]) == 0
    text = readme.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("After\n")
    assert "old" not in text
    rows = table.read_text().splitlines()
    assert len(rows) == 1 + len(OPERATIONS)
    assert any(row.startswith("deconv,ConvTranspose,f32,1,") for row in rows)


def test_a_smaller_batch_has_at_most_the_work_asked_for(tmp_path: Path) -> None:
    """--gmac limits the images of a layer by its work, but never below one."""
    path = tmp_path / "some.json"
    path.write_text(json.dumps([ROWS[0] | {"bench_n": 8, "bench_gmac": 0.8}]))
    for gmac, images in ((1.0, 8), (0.35, 3), (0.01, 1)):
        assert read_layers(path, ["Convolution"], [], gmac)[0].problem("f32", "NCX").n == images
