"""Conversations with tools for the demo corpus.

`layout` writes tools, calls and results as the chat template does, `wordings` says things in many
ways, `kinds` knows the tools that training sees and those kept back, `free` and `free_actions`
compose tools of any words, and `conversations` puts exchanges together.
"""
