"""Models: one file per family, a registry from Hugging Face architecture names, and loading.

A model is its layers, their checkpoint names and a forward pass.
"""
