"""Exact, fast convolution gradients over HTTP: the client of the convgrad service."""

__version__ = "0.1.0"
