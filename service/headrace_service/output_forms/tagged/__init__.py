"""Calls with tags around each argument, whose value is text where the schema says string.

`arguments` says which values are text, `reader` makes one JSON object of tags and values; a file
for each format has its tags and its grammar.
"""
