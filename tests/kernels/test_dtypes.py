"""The table of dtypes: its numbers are those of NumPy and ml_dtypes, and nothing takes a dtype that has no row."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from math import frexp
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir

from kernels.dtypes import DTYPES, DType
from kernels.emit import simd
from kernels.emit.intrinsics import size_of
from kernels.problem import storage_dtype
from kernels.reference import narrow, widen
from kernels.target import target

_NUMPY: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f64": np.float64}


def _builder() -> tuple[Any, Any]:
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), [ir.VectorType(simd.F32, 8)]), "f")
    return ir.IRBuilder(function.append_basic_block()), function.args[0]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rows_agree_with_numpy(dtype: DType) -> None:
    """Bits, exponents and infinity are those of the libraries' own descriptions of the format."""
    kind = np.dtype(_NUMPY[dtype.name])
    finfo: Any = ml_dtypes.finfo  # which has no types
    facts = finfo(kind)
    assert (dtype.size, dtype.digits) == (kind.itemsize, facts.nmant + 1)
    assert (dtype.least, dtype.largest) == (facts.minexp, facts.maxexp)
    assert dtype.smallest == frexp(float(facts.smallest_subnormal))[1] - 1
    assert dtype.infinity == int(np.array(np.inf, kind).view(f"u{dtype.size}"))


@pytest.mark.parametrize(
    "use",
    [
        storage_dtype,
        size_of,
        simd.storage,
        lambda name: widen(np.zeros(1, np.uint16), name),
        lambda name: narrow(np.zeros(1), name),
        lambda name: simd.widen(_builder()[0], ir.Constant(ir.VectorType(ir.IntType(16), 8), [0] * 8), name),
        lambda name: simd.narrow(*_builder(), name),
    ],
    ids=["storage_dtype", "size_of", "simd.storage", "widen", "narrow", "simd.widen", "simd.narrow"],
)
def test_an_unknown_dtype_is_not_taken_for_another(use: Callable[[str], object]) -> None:
    """A dtype without a row raises; it isn't read as one that is stored in as many bytes."""
    with pytest.raises(KeyError, match="f8_e5m2"):
        use("f8_e5m2")


@pytest.mark.skipif(not target().compiles, reason="nothing is compiled")
def test_compiled_code_crashes_on_an_unknown_dtype() -> None:
    """A number that is no case of a compiled choice ends the process, instead of meaning f32."""
    script = "import numba; from kernels.emit.intrinsics import stored_size as f; print(numba.njit(lambda n: f(n))({}))"
    sizes = [subprocess.run([sys.executable, "-c", script.format(number)], capture_output=True) for number in (0, 3)]
    assert sizes[0].stdout == b"4\n"
    assert sizes[1].returncode in (-signal.SIGILL, -signal.SIGTRAP)
