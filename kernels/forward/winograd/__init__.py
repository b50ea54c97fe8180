"""Convolution and ConvTranspose by Winograd's algorithm."""
