"""Tests of the kernels on GPUs: in Triton's interpreter, by compiling, and on a GPU."""
