"""The service: APIs, planning, the worker pool and the engines."""
