"""Convolution, ConvTranspose and data gradients: gathered, scattered, by Winograd, or on tile registers in cells."""
