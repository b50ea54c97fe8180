"""Tests of `engine.sealed`."""
