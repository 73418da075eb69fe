"""The reading and writing of messages.

Parsing that guesses nothing, lengths, and descriptors for reflection.
"""
