"""Benchmarks as commands: `python -m benchmarks.NAME --json FILE`.

Each prints its figures beside a ceiling or a rival of the same run.
"""
