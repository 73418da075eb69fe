"""Long work that says how far it is: a bar on a terminal, lines elsewhere.

    phase   one stretch of work: how much of it is done, at what rate, and when it will be
    bars    phases as rich's bars on a terminal
    shown   phases for a command: bars, or a line every few seconds

Owns the words and the form of progress, whatever it is of: a start, a load, a measurement, a
download. Imports nothing of ours.
"""
