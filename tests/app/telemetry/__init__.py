"""Tests of app/telemetry."""
