"""Claims about the intake of request bodies."""
