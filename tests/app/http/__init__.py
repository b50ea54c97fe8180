"""Tests of app/http."""
