"""The register tiles of this processor, compiled once each, and the switch among them."""

from __future__ import annotations

from typing import Any

from kernels._jit import jit
from kernels.cpu import cpu
from kernels.simd import fma_tile

__all__ = ["run_tile"]

_ARGUMENTS = "void(" + ", ".join(["int64"] * 13) + ")"


def _tile(rows: int, vectors: int) -> Any:
    emit = fma_tile(rows, vectors, cpu().width)

    def tile(v: int, v_o: int, v_r: int, v_c: int, s: int, s_o: int, s_r: int, s_c: int,
             n_o: int, n_r: int, n_c: int, offsets: int, acc: int) -> None:  # fmt: skip
        emit(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)

    tile.__name__ = tile.__qualname__ = f"_tile_{rows}x{vectors}"
    return jit(_ARGUMENTS)(tile)


_t11, _t21, _t31, _t41, _t51, _t61, _t71, _t81 = (_tile(rows, 1) for rows in range(1, 9))
_t12, _t22, _t32, _t42, _t52, _t62, _t72, _t82 = (_tile(min(rows, cpu().rows[2]), 2) for rows in range(1, 9))


@jit("void(" + ", ".join(["int64"] * 15) + ")")
def run_tile(
    vectors: int, rows: int, v: int, v_o: int, v_r: int, v_c: int, s: int, s_o: int, s_r: int, s_c: int,
    n_o: int, n_r: int, n_c: int, offsets: int, acc: int,
) -> None:  # fmt: skip
    """Run the register tile of `rows` x `vectors`; the arguments are those of `kernels.simd.fma_tile`."""
    if vectors == 2:
        if rows == 6:
            _t62(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 5:
            _t52(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 8:
            _t82(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 4:
            _t42(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 3:
            _t32(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 7:
            _t72(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 2:
            _t22(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        else:
            _t12(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
    else:
        if rows == 8:
            _t81(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 6:
            _t61(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 7:
            _t71(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 5:
            _t51(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 4:
            _t41(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 3:
            _t31(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        elif rows == 2:
            _t21(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
        else:
            _t11(v, v_o, v_r, v_c, s, s_o, s_r, s_c, n_o, n_r, n_c, offsets, acc)
