"""The reference's sums of float64: how they are cut and laid out for the loops of all other kernels."""
