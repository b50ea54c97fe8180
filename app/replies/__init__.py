"""The forms of a reply: JSON, streamed `.npy`, server-sent events, tensor frames; and the choice."""
