"""Tests of app/api/oip."""
