"""The ways that spans take.

To a collector, into a file, and into the memory that `headrace trace` reads.
"""
