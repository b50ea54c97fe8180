"""The services that ours is compared with: each file runs on its own, by an interpreter with its own packages."""
