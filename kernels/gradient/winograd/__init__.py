"""Weight gradients of 3x3 kernels by Winograd's F(3x3, 2x2): units and compiled driver."""
