"""What an output of a conversation is made of: reasoning, the answer's text, calls of functions.

Owns the formats in which models write these, a file for each: how they are read while tokens arrive
(the same parts, however the text is cut) and the grammar that holds a model to them. `model_form`
chooses a model's format by its folder; `output_reader` puts reasoning and calls together. Knows
text alone: no tokenizer, no wire, no engine.
"""
