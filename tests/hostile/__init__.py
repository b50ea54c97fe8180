"""The service under callers who mean harm: documents held to their word, and what no client of good will sends."""
