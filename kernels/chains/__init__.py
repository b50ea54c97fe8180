"""The reference's sums of float64: how they are cut and packed, for the loops of all other kernels."""
