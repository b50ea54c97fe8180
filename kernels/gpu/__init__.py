"""Kernels in Triton for NVIDIA GPUs, on tensors of PyTorch; imported only where a caller chose a GPU."""
