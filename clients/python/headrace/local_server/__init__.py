"""A server on this machine, run by its user's own program: whether it is installed, its process."""
