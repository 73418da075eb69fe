"""The text of a model: tokenizer, chat template and its helper process, detokenizer."""
