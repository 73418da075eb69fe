"""The ways that spans take: to a collector, into a file, and into the memory that `headrace trace`
reads.
"""
