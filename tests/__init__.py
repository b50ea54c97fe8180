"""The tests mirror the source: one folder for each room, the oracle and the end-to-end tests beside them."""
