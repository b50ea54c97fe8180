"""Fuzz targets of everything that reads bytes which nobody vouches for; `scripts/fuzz` runs them."""
