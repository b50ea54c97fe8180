"""ConvTranspose forward: gathered, scattered, or made of bf16 products cell by cell."""
