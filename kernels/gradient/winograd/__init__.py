"""Weight gradients of 3x3 kernels by Winograd's F(3x3, 2x2): layout, compiled driver, units."""
