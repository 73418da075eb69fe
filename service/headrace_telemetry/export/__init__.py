"""Where spans go: to a collector, into a file, and into the memory that `headrace trace` asks."""
