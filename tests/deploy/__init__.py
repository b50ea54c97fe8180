"""The files of `deploy/`, the compose file and the image's files, checked and run."""
