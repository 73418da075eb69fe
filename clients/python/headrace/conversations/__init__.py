"""Conversations as a caller writes them, and what the model says in them besides text."""
