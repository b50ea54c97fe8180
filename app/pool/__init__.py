"""Worker processes, the shared memory they compute in, and the supervisor that keeps them at work."""
