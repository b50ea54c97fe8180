"""Tests of app/api/rpc."""
