"""Sealed checks: the service draws the cases, judges the results and signs the outcome."""
