"""Tests of the worker pool."""
