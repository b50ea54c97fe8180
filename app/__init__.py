"""The service: doors, planning, the worker pool and the engines."""
