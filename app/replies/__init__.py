"""Reply formats: JSON, streamed `.npy`, server-sent events, tensor frames; and content negotiation."""
