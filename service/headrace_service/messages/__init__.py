"""How messages are read and written: parsing that guesses nothing, lengths, and descriptors for reflection."""
