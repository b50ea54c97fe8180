"""Tests of the benchmarks: that they measure what they claim to."""
