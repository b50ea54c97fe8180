"""Decode request bodies into tensor memory as they arrive: JSON with base64, multipart with `.npy` parts."""
