"""Tests of app/intake."""
