"""The services that ours is measured beside: each file is run alone, by an interpreter with its own packages."""
