"""The tests mirror the source: one folder per package, with the oracle and the end-to-end tests beside them."""
