"""The Open Inference Protocol at /v2: its requests, shared-memory regions and replies."""
