"""Fuzz targets for all code that reads untrusted bytes; `scripts/fuzz` runs them."""
