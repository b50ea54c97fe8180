"""Worker processes, the shared memory they compute in, and the engine that keeps them at work."""
