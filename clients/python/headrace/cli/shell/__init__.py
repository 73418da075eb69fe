"""Completion of `headrace` in bash, zsh and fish.

Scripts hold all words, so that a shell completes without starting Python: asking the program at
every key press, as click's own scripts do, loads it each time, which took 2.2 s of CPU for the
options of `headrace serve`. A script is made again after an upgrade.
"""
