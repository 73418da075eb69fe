"""The text of a model: tokenizer, chat template with its helper process, and the way from token ids
back to text.
"""
