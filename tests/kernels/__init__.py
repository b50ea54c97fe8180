"""Tests of `kernels/`: every code path against the oracle, bit for bit."""
