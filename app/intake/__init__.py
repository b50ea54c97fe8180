"""Decode request bodies into tensor memory as they arrive: JSON with base64 or numbers, multipart with `.npy` parts."""
