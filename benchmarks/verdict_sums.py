"""Sums that a verdict is tried on: factors of many kinds, their exact sums, and honest ways to add the products."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numba
import numpy as np
import numpy.typing as npt

from kernels import ConvProblem
from kernels.reference import REFERENCE, narrow
from verify.arithmetic import Arithmetic
from verify.compared import Compared
from verify.reading import Inputs, read_bytes
from verify.report import as_json, report_on
from verify.rules import judge
from verify.sums import Sums, unit_sums

__all__ = ["DATA", "KINDS", "Array", "Trial", "compiled", "empty", "honest", "trial"]

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., None])
KINDS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f64": np.float64}


@dataclass
class Trial:
    """Two factors, channels by products of a sum: all elements of a 1x1 gradient, with their exact sums."""

    dtype: str
    src: Array  # (n, I)
    diff_dst: Array  # (n, O)
    images: int
    product: Callable[[Array, Array], Array] = lambda a, b: b @ a.T
    """How the kernel under trial sums products, in the dtype that it sums in."""

    def __post_init__(self) -> None:
        n = self.src.shape[0]
        self.problem = ConvProblem(
            op="ConvolutionBackwardWeights", dtype=self.dtype, n=self.images, src_channels=self.src.shape[1],  # type: ignore[arg-type]
            dst_channels=self.diff_dst.shape[1], groups=1, src_spatial=(n // self.images,),
            dst_spatial=(n // self.images,), kernel=(1,), strides=(1,), dilations=(1,), pads_begin=(0,),
            data_format="NXC", weights_format="OIX",
        )  # fmt: skip
        self.inputs = [_stored(each).reshape(self.images, n // self.images, -1) for each in (self.src, self.diff_dst)]
        unit = REFERENCE.units(self.problem, 1)[0][0]
        found = unit_sums(self.problem, unit, self.inputs, lambda: False)
        assert found is not None
        self.sums: Sums = found
        wide = np.float64 if self.dtype == "f64" else np.float32
        self.a = np.ascontiguousarray(self.src.astype(wide).T)
        self.b = np.ascontiguousarray(self.diff_dst.astype(wide).T)

    def broken(self, result: Array, arithmetic: Arithmetic | None) -> str | None:
        """Return the first rule but `hypotheses` that fails a result; much faster than a report."""
        compared, _ = self._compared(result, arithmetic, explain=False)
        _, tally = judge(compared, np.zeros(compared.exact.shape, np.float32), lambda _: None, lambda: False)
        fails = {
            "exact": tally.exact_failed,
            "mean_square": not tally.mean_square_passed,
            "largest": tally.failed,
        }
        return next((rule for rule, fails in fails.items() if fails), None)

    def judge(self, result: Array, *, explain: bool = False, arithmetic: Arithmetic | None = None) -> dict[str, Any]:
        """Return the report on a result, O by I, in the dtype of the trial, of a kernel with this arithmetic."""
        compared, inputs = self._compared(result, arithmetic, explain=explain)
        stop = lambda: False  # noqa: E731
        found = inputs.described(report_on(compared, stop), compared.result, stop)
        report: dict[str, Any] = json.loads(as_json(found))
        return report

    def _compared(self, result: Array, arithmetic: Arithmetic | None, *, explain: bool) -> tuple[Compared, Inputs]:
        shape, said, stop = self.problem.output_shape, arithmetic or Arithmetic.usual(self.dtype), lambda: False
        stored = _stored(np.ascontiguousarray(result)).reshape(shape)
        inputs = Inputs(self.problem, said, self.inputs, np.zeros(read_bytes(self.problem, said), np.uint8))
        sums = self.sums
        if said.readings:
            inputs.read(stored, stop)
            sums = unit_sums(self.problem, REFERENCE.units(self.problem, 1)[0][0], inputs.given, stop)
        high, spread = sums.high.reshape(shape), sums.spread.reshape(shape).copy()
        low = None if sums.low is None else sums.low.reshape(shape)
        return Compared(self.problem, inputs.given, stored, high, low, spread, explain, arithmetic=said), inputs

    def rounded(self, values: Array) -> Array:
        """Round sums to the dtype once."""
        with np.errstate(over="ignore", invalid="ignore"):
            if values.dtype == np.float64:
                return narrow(values, self.dtype).view(KINDS[self.dtype])
            return values.astype(KINDS[self.dtype])


def _stored(tensor: Array) -> Array:
    return tensor if tensor.itemsize > 2 else tensor.view(np.uint16)


def compiled(function: F) -> F:
    """Compile a function."""
    found: Any = numba.njit(function)
    return found  # type: ignore[no-any-return]


@compiled
def _sequential(a: Array, b: Array, block: int, found: Array) -> None:
    """Sum each block in order, then add the blocks in order."""
    n = a.shape[1]
    for o in range(b.shape[0]):
        for i in range(a.shape[0]):
            total = found[o, i]
            for start in range(0, n, block):
                some = total * 0
                for k in range(start, min(n, start + block)):
                    some += a[i, k] * b[o, k]
                total += some
            found[o, i] = total


@compiled
def _lanes(a: Array, b: Array, lanes: Array, found: Array) -> None:
    """Sum in lanes, as vectors do, and then the lanes."""
    n, count = a.shape[1], lanes.size
    for o in range(b.shape[0]):
        for i in range(a.shape[0]):
            lanes[:] = 0
            for k in range(n):
                lanes[k % count] += a[i, k] * b[o, k]
            for lane in range(1, count):
                lanes[0] += lanes[lane]
            found[o, i] = lanes[0]


@compiled
def _pairwise(a: Array, b: Array, terms: Array, found: Array) -> None:
    n = a.shape[1]
    for o in range(b.shape[0]):
        for i in range(a.shape[0]):
            for k in range(n):
                terms[k] = a[i, k] * b[o, k]
            count = n
            while count > 1:
                half = count // 2
                for k in range(half):
                    terms[k] = terms[2 * k] + terms[2 * k + 1]
                if count % 2:
                    terms[half] = terms[count - 1]
                count = half + count % 2
            found[o, i] = terms[0]


@compiled
def _fused(a: Array, b: Array, found: Array) -> None:
    """Sum f32 in order with products that are not rounded."""
    for o in range(b.shape[0]):
        for i in range(a.shape[0]):
            total = np.float32(0)
            for k in range(a.shape[1]):
                total = np.float32(np.float64(total) + np.float64(a[i, k]) * np.float64(b[o, k]))
            found[o, i] = total


def empty(trial: Trial) -> Array:
    """Return zeros for the sums of a trial."""
    return np.zeros((trial.b.shape[0], trial.a.shape[0]), trial.a.dtype)


def _ordered(trial: Trial, order: Array | slice, block: int) -> Array:
    found = empty(trial)
    _sequential(np.ascontiguousarray(trial.a[:, order]), np.ascontiguousarray(trial.b[:, order]), block, found)
    return found


def honest(trial: Trial, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """Yield results of a trial that kernels may give, O by I."""
    n = trial.a.shape[1]
    every = 1 << 62
    yield "rounded once", trial.rounded(trial.sums.high.reshape(trial.b.shape[0], -1))
    yield "BLAS", trial.rounded(trial.b @ trial.a.T)
    yield "sequential", trial.rounded(_ordered(trial, slice(None), every))
    yield "backwards", trial.rounded(_ordered(trial, slice(None, None, -1), every))
    yield "shuffled", trial.rounded(_ordered(trial, rng.permutation(n), every))
    yield "blocks of 256", trial.rounded(_ordered(trial, slice(None), 256))
    yield "image by image", trial.rounded(_ordered(trial, slice(None), n // trial.images))
    pixels_first = np.arange(n).reshape(trial.images, -1).T.reshape(-1)
    yield "pixel by pixel", trial.rounded(_ordered(trial, pixels_first, every))
    found = empty(trial)
    _lanes(trial.a, trial.b, np.zeros(16, trial.a.dtype), found)
    yield "16 lanes", trial.rounded(found)
    found = empty(trial)
    _pairwise(trial.a, trial.b, np.zeros(n, trial.a.dtype), found)
    yield "pairwise", trial.rounded(found)
    if trial.dtype != "f64":
        found = empty(trial)
        _fused(trial.a, trial.b, found)
        yield "fused", trial.rounded(found)


def _smooth(rng: np.random.Generator, n: int, channels: int) -> Array:
    waves = rng.standard_normal((8, channels))
    at = np.linspace(0, 1, n)[:, None]
    return np.asarray(sum(wave * np.sin((k + 1) * 2 * at + 3 * wave) for k, wave in enumerate(waves)))


DATA: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "normal": lambda rng, n, c: rng.standard_normal((n, c)),
    "half positive": lambda rng, n, c: np.maximum(rng.standard_normal((n, c)), 0),
    "positive": lambda rng, n, c: rng.random((n, c)),
    "smooth": _smooth,
    "heavy tails": lambda rng, n, c: rng.standard_t(1.5, (n, c)),
    "sparse": lambda rng, n, c: rng.standard_normal((n, c)) * (rng.random((n, c)) < 0.05),
    "integers": lambda rng, n, c: rng.integers(-4, 5, (n, c)).astype(float),
    "large integers": lambda rng, n, c: rng.integers(-3000, 3001, (n, c)).astype(float),
    "tiny": lambda rng, n, c: rng.standard_normal((n, c)) * 2.0**-70,
    "huge": lambda rng, n, c: rng.standard_normal((n, c)) * 2.0**40,
    "constant": lambda _, n, c: np.full((n, c), 0.1),
    "nearly constant": lambda rng, n, c: 0.1 + 0.001 * rng.standard_normal((n, c)),
    "trend": lambda _, n, c: np.linspace(-1, 1, n)[:, None] * (1 + np.arange(c)),
    "few values": lambda rng, n, c: rng.choice([0.1, 0.3, -0.7], (n, c)),
    "uneven channels": lambda rng, n, c: rng.standard_normal((n, c)) * 10.0 ** rng.integers(-6, 7, c),
    "subnormal": lambda rng, n, c: rng.standard_normal((n, c)) * 2.0**-64,
}
_HALF = {"tiny": 2.0**-6 / 2.0**-70, "huge": 2.0**4 / 2.0**40, "subnormal": 2.0**-9 / 2.0**-64}


def trial(rng: np.random.Generator, data: str, dtype: str, n: int, channels: int, images: int) -> Trial:
    """Return a trial of one kind of data."""
    factors = []
    for kind in (data, "normal" if data == "half positive" else data):
        values = DATA[kind](rng, n, channels)
        if dtype == "f16":
            values = np.clip(values * _HALF.get(kind, 1.0) * (0.01 if "large" in data else 1), -60000, 60000)
        if dtype == "f64" and data == "integers":
            values *= 2.0**20
        factors.append(values.astype(KINDS[dtype]))
    return Trial(dtype, factors[0], factors[1], images)
