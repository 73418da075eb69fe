"""Text to token ids, without ever stopping the event loop.

Owns the `tokenizers` object and the threads for long texts: `encode` releases the interpreter's
lock, so that a 4 MiB prompt costs other calls nothing. Short texts are encoded in place, which is
quicker than waking a thread. The way back is `detokenizer`'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures

import numpy as np
import numpy.typing as npt
import tokenizers

TokenIds = npt.NDArray[np.uint32]
# What is converted without a pause: a few milliseconds' worth.
SLICE_TOKENS = 1 << 16
_INLINE_CHARS = 2048


class Tokenizer:
    """A model's tokenizer.

    Args:
        tokenizer: the library's, which is this object's from now on.
        threads: where long texts are encoded.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, threads: concurrent.futures.Executor) -> None:
        self._tokenizer = tokenizer
        # A truncation or padding saved in the file would silently change prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._threads = threads

    async def encode(self, text: str, add_special_tokens: bool) -> TokenIds:
        """Returns the ids of a text.

        Args:
            text: any.
            add_special_tokens: whether the post-processor adds its own, such as beginning-of-text.
        """
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, text, add_special_tokens)

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """Returns a word's tokens at a text's start and after a space, no special ones."""
        variants = {tuple(self._encode(variant, False).tolist()) for variant in (word, " " + word)}
        return sorted(variant for variant in variants if variant)

    def _encode(self, text: str, add_special_tokens: bool) -> TokenIds:
        # The batch call of one leaves character offsets out, which nobody here reads.
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        column = np.empty(len(ids), dtype=np.uint32)
        # In slices, between which the interpreter's lock can change hands.
        for begin in range(0, len(ids), SLICE_TOKENS):
            column[begin : begin + SLICE_TOKENS] = ids[begin : begin + SLICE_TOKENS]
        return column
