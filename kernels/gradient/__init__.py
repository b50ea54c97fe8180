"""Weight gradients, of Convolution and of ConvTranspose: where things lie, then sums on register tiles or on products
of bf16."""
