"""The services that ours is compared with: each file runs on its own, with an interpreter and packages of its own."""
