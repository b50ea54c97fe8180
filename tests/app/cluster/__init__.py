"""Tests of the engine `ray` that need no Ray; `tests/cluster/` has the others."""
