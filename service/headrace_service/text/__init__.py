"""A model's text: tokenizer, chat template with its helper process, and the way back from token ids to text."""
