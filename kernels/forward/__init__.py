"""Convolution, ConvTranspose and data gradients: gathered, scattered, or by Winograd."""
