"""Metrics, traces, logs and the timings of a request."""
