"""Body bytes to buffers, as they arrive: JSON with base64, multipart with `.npy` parts."""
