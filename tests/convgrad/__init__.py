"""Tests of the client package: wire formats, client and command."""
