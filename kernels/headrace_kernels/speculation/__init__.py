"""What a step of drafted tokens does on the device beside the model and the draw.

Rows go on where they stand there, whether or not a host has read what they settled.

draft_inputs    columns that were planned by upper bounds: ids and positions as rows stand
acceptance      which drafts are equal to what was drawn, and where rows stand then
draft_passes    what a pass that drafts reads, and what it leaves for the next one
kept_states     the state beside the keys of the token before each
ngram           drafts from a row's own tokens: what followed its last ones before
suffix          the same from earlier answers too, and how these are kept
"""
