"""Tests of `kernels/`: every path against the oracle, bit for bit."""
