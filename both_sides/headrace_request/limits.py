"""The limits of one request, stated once.

What the API's comments promise to callers, and what follows from that for the engine.

Owns the numbers. Services check what callers send by them, the engine checks again what services
send, and buffers are sized by them. Does not own limits that a configuration sets (outputs,
context, messages) nor those of the engine's state. Tests hold the comments of protos/ to these
numbers.
"""

from __future__ import annotations

from typing import Final

# Outputs, reports and order.

MAX_OUTPUTS: Final = 128
"""Outputs (n) of one request; a server's configuration may allow fewer."""

MAX_LOGPROBS: Final = 20
"""Most likely tokens reported beside each token, of outputs and of prompts."""

MAX_BEST_OF: Final = 20
"""Outputs computed to report the best of them; a server's configuration may allow fewer."""

MAX_BEAM_WIDTH: Final = 16
"""Hypotheses that a beam search keeps; a server's configuration may allow fewer."""

MAX_LENGTH_PENALTY: Final = 10.0
"""Largest absolute value of a beam search's length penalty."""

MAX_BEAM_STOP_TOKENS: Final = 16
"""Tokens that end a hypothesis, the model's own end-of-text tokens among them."""

MAX_ROW_LOGPROBS: Final = max(MAX_LOGPROBS, MAX_BEAM_WIDTH + MAX_BEAM_STOP_TOKENS)
"""Most likely tokens that a worker reports at each token of a row."""

MAX_DRAFTS: Final = 8
"""Drafted tokens that a step verifies for one output."""

MAX_PRIORITY: Final = 100
"""Largest absolute value of a priority."""

MAX_TIME_LIMIT_S: Final = 24 * 3600
"""Seconds that a request may ask to live."""

# Names and keys.

REQUEST_ID_PATTERN: Final = r"[A-Za-z0-9_-]{1,64}"
"""Regular expression that a whole request id matches."""

MAX_TENANT_BYTES: Final = 256
"""UTF-8 bytes of a tenant's name."""

MAX_CACHE_SALT_BYTES: Final = 256
"""UTF-8 bytes of the prefix cache's salt."""

MAX_IDEMPOTENCY_KEY_BYTES: Final = 256
"""UTF-8 bytes of an idempotency key."""

MAX_PAGE_SIZE: Final = 1000
"""Requests on one page of a listing."""

# Sampling. A bound that float32 can't hold counts as rounded to it, as the wire has it.

MIN_TEMPERATURE: Final = 0.01
"""Smallest temperature above 0, which is greedy. A smaller one divides logits to infinity."""

MAX_TEMPERATURE: Final = 100.0
"""Largest temperature."""

MAX_TOP_N_SIGMA: Final = 100.0
"""Most standard deviations of the logits that are kept."""

MIN_REPETITION_PENALTY: Final = 0.01
"""Smallest repetition penalty. A smaller one divides logits to infinity."""

MAX_REPETITION_PENALTY: Final = 10.0
"""Largest repetition penalty."""

MAX_PENALTY: Final = 2.0
"""Largest absolute value of the presence and the frequency penalty."""

MAX_SEED: Final = 2**64 - 1
"""Largest seed."""

MAX_LOGIT_BIAS: Final = 1024
"""Entries of logit_bias."""

MAX_BIAS: Final = 100.0
"""Largest absolute value of one bias."""

# Stop conditions.

MAX_STOP_STRINGS: Final = 16
"""Entries of stop.strings."""

MAX_STOP_STRING_BYTES: Final = 256
"""UTF-8 bytes of one stop string, at least 1."""

MAX_STOP_TOKEN_IDS: Final = 64
"""Entries of stop.token_ids, beside the model's own end-of-text tokens."""

MAX_BAD_WORDS: Final = 64
"""Entries of stop.bad_words."""

MAX_BAD_WORD_BYTES: Final = 256
"""UTF-8 bytes of one bad word, at least 1."""

ENCODINGS_PER_BAD_WORD: Final = 2
"""Token sequences that one bad word becomes: with and without a leading space."""

MAX_BAD_WORD_SEQUENCES: Final = ENCODINGS_PER_BAD_WORD * MAX_BAD_WORDS
"""Token sequences that the engine is sent for all bad words."""

MAX_BAD_WORD_TOKENS: Final = MAX_BAD_WORD_BYTES + 6
"""Tokens of one such sequence: one for each byte of the word and of two leading spaces.

Some tokenizers add these and write them as 3 bytes each. Only a tokenizer that lengthens text
makes more of a word.
"""

# Structured output.

MAX_STRUCTURED_BYTES: Final = 256 << 10
"""UTF-8 bytes of a structured output's schema, expression, grammar, choices or tags."""

MAX_STRUCTURED_DEPTH: Final = 64
"""Levels of objects and arrays of JSON that a structured output is written in."""

# Reasoning.

MAX_MARKER_TOKENS: Final = 32
"""Tokens of the marker that begins a section of reasoning, and of the one that ends it."""
