"""Tests of `convgrad check`."""
