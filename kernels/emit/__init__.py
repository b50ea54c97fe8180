"""LLVM IR for Numba: vectors, register tiles, depthwise sums, products of bf16 pairs, and the table of what is
compiled."""
