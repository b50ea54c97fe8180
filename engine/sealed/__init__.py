"""Sealed checks: cases from secret seeds, verdicts on the results, and a signed document with the outcomes."""
