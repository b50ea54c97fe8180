"""Packing: from tensors in any layout and dtype into the panels that kernels walk."""
