"""How each next token of a request is chosen.

Owns the values, with unit, range and default. A field of headrace.v1.SamplingParameters is the
field of the same name here. Ranges are checked by `rules`; what a value does to logits is
`headrace_kernels.sampling`'s business.
"""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Every value is resolved: none stands for a default that somebody else knows.

    Crosses to the engine and to workers by the order of its fields (`request.LAYOUT`). Columns are
    little-endian, 4 bytes an entry.
    """

    # Divides the logits; 0: the most likely token. 0, or 0.01 to 100.
    temperature: float = 1.0
    # Share of the probability that the most likely tokens which are kept reach. Above 0, to 1; 1
    # keeps all.
    top_p: float = 1.0
    # Number of most likely tokens that are kept. -1 to the vocabulary size; 0 and -1 keep all.
    top_k: int = 0
    # Least probability relative to the most likely token's. 0 to 1; 0 keeps all.
    min_p: float = 0.0
    # Standard deviations of the logits, from the highest one down, that are kept. 0 to 100; 0 keeps
    # all.
    top_n_sigma: float = 0.0
    # Divides positive and multiplies negative logits of tokens in prompt and output. 0.01 to 10; 1
    # changes nothing.
    repetition_penalty: float = 1.0
    # Subtracted from the logits of tokens in the output. -2 to 2.
    presence_penalty: float = 0.0
    # Subtracted from a token's logit for each time that it is in the output. -2 to 2.
    frequency_penalty: float = 0.0
    # Keys the noise, with the output and the position. 0 to 2^64 - 1.
    seed: int = 0
    # Added to logits: uint32 token ids, each once, and as many float32 values, -100 to 100.
    logit_bias_ids: bytes = b""
    logit_bias_values: bytes = b""
    # Token sequences that are never completed, uint32 each.
    bad_words: tuple[bytes, ...] = ()

    @property
    def penalizes(self) -> bool:
        """Whether tokens that the prompt or the output contains lose or gain."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return bool(self.bad_words) or self.penalizes
