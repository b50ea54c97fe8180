"""The reference's sums of float64 by compiled code: how they are cut, what the loops are told, and the loops."""
