"""Reply formats: JSON, `.npy`, multipart, server-sent events, tensor frames; content negotiation; errors."""
