"""GGUF files, without torch: the header, and what it says in the words of a Hugging Face folder.

These are config.json's fields (`config`), tensor names (`tensors`), tokenizer.json and chat
template (`tokenizer`).
"""
