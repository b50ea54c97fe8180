"""Tests of the reply forms."""
