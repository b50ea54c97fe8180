"""The reference, compiled: sums in float64 whose order is the same on every processor (`kernels.emit.doubles`)."""
