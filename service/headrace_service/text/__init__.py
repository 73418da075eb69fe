"""The text of a model: tokenizer, chat template with its helper process, and the way back from token
ids to text.
"""
