"""The doors: HTTP in, HTTP out, and nothing else."""
