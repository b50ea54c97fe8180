"""The use cases, the same for every API: admit, prepare, plan, run, cancel. Knows no HTTP."""
