"""The reading and writing of messages: parsing that guesses nothing, lengths, and descriptors for
reflection.
"""
