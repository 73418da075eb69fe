"""One output of a stream: the tokens that wait for the reader, and the text they become.

Owns what is pending for one (stream, output), and cuts it into deltas whose ids, text and log
probabilities cover the same tokens. A subscription that starts in the middle is rendered from token
0, silently, up to the last token before its first one whose text was decided by then; if the output
ended before that token, there is nothing to deliver.
"""

from __future__ import annotations

from array import array

import numpy as np

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.output_forms.parts import Part
from headrace_service.streams.content_reader import ContentReader
from headrace_service.streams.render_state import RenderState
from headrace_service.streams.wires import EventWire, TokenLogprobs
from headrace_service.text.detokenizer import IncrementalDetokenizer, PieceTable
from headrace_service.tracing.recording import Recording

# Keep a message of a long replay well under the smallest limit of a message, 64 KiB: a token of
# text takes some 10 bytes, one with 20 most likely tokens 150 bytes of headrace.v1 and 1.7 kB of
# KServe's JSON.
_MAX_DELTA_TOKENS = 1024
_MAX_LOGPROB_DELTA_TOKENS = 16
# First token's position, token ids, text, log probabilities, parts.
_Run = tuple[int, list[int], str, list[TokenLogprobs] | None, list[Part] | None]


class OutputText:
    """Pending tokens and text state of one output.

    Attributes:
        tokens: token ids not yet rendered.
        logprobs: their log probabilities, one per token; None if the request asked for none.
        end: set once the output has ended.
        num_tokens: how many tokens were delivered, or wait.
        num_taken: how many were taken to be delivered.
    """

    __slots__ = (
        "_content",
        "_detokenizer",
        "_entries",
        "_has_news",
        "_kept",
        "_max_delta_tokens",
        "_next_token",
        "_output_index",
        "_skip_left",
        "_unsent_logprobs",
        "_wire",
        "end",
        "logprobs",
        "tokens",
    )

    def __init__(
        self,
        output_index: int,
        table: PieceTable,
        render: RenderState,
        from_token: int,
        wire: EventWire,
        recording: Recording | None = None,
        keeps: bool = False,
        place: str = "",
    ) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if render.with_logprobs else None
        self._max_delta_tokens = _MAX_LOGPROB_DELTA_TOKENS if render.with_logprobs else _MAX_DELTA_TOKENS
        self.end: engine_pb2.OutputEnd | None = None
        self._output_index = output_index
        self._wire = wire
        # Take the number of tokens of each delta, where somebody records them.
        self._entries = recording.entries_of(output_index) if recording is not None else None
        # None: the reader wants token ids alone.
        self._detokenizer = None if render.ids_only else IncrementalDetokenizer(table, render.skip_special)
        # None: the output is text alone.
        self._content: ContentReader | None = None
        if render.plan is not None and not render.ids_only:
            self._content = ContentReader(render.plan, f"{place}/{output_index}", table, render.skip_special)
        # Tokens that were rendered, where another engine may have to go on from them.
        self._kept: array[int] | None = array("I") if keeps else None
        self._next_token = 0
        self._skip_left = from_token
        # Whether there was a token that the subscription wants; until then what is held back was
        # the reader's before.
        self._has_news = from_token == 0
        # Log probabilities of tokens that the detokenizer holds back, then of those that it gets
        # next.
        self._unsent_logprobs: list[TokenLogprobs] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that came, delivered or not."""
        return self._next_token + len(self.tokens)

    @property
    def calls_tools(self) -> bool:
        """Whether the output has called a function."""
        return self._content is not None and self._content.num_calls > 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, delivered or held back."""
        return self._content.num_reasoning_tokens if self._content is not None else 0

    def emitted(self) -> bytes:
        """Returns the ids of all tokens that came, uint32 little-endian, if they are kept."""
        assert self._kept is not None
        return np.array([*self._kept, *self.tokens], "<u4").tobytes()

    @property
    def num_taken(self) -> int:
        """Tokens that were delivered."""
        return self._next_token

    def take(self, messages: list[bytes]) -> None:
        """Appends the messages of all that is pending, as the wire writes them."""
        if self._skip_left:
            self._skip()
        self._has_news = self._has_news or bool(self.tokens)
        if len(self.tokens) > self._max_delta_tokens:
            self._take_all_but_last(messages)
        if self.end is None:
            self._append_delta(messages, *self._release(len(self.tokens)))
        elif self._has_news:
            self._append_delta(messages, *self._finish(self.end.trim_bytes))

    def _take_all_but_last(self, messages: list[bytes]) -> None:
        """Appends the messages of more tokens than one holds, but for the last.

        What the end trims stays whole in that one.
        """
        num_trimmed = 0
        if self.end is not None and self._detokenizer is not None:
            num_trimmed = self._detokenizer.num_trimmed(self.tokens, self.end.trim_bytes)
        last = max(self._max_delta_tokens, num_trimmed)
        while len(self.tokens) > last:
            self._append_delta(messages, *self._release(min(self._max_delta_tokens, len(self.tokens) - last)))

    def _skip(self) -> None:
        """Renders tokens before the first one wanted without delivering them.

        What is held back at the border is delivered.
        """
        num_tokens = min(self._skip_left, len(self.tokens))
        self._skip_left -= num_tokens
        if num_tokens:
            self._release(num_tokens)

    def _release(self, num_tokens: int) -> _Run:
        batch = self.tokens[:num_tokens]
        del self.tokens[:num_tokens]
        if self._kept is not None:
            self._kept.extend(batch)
        logprobs_batch = self._take_logprobs(num_tokens)
        if self._content is not None:
            token_ids, parts = self._content.feed(batch)
            return *self._advance(token_ids, "", logprobs_batch), parts
        token_ids, text = self._detokenizer.feed(batch) if self._detokenizer is not None else (batch, "")
        return *self._advance(token_ids, text, logprobs_batch), None

    def _finish(self, trim_bytes: int) -> _Run:
        batch, self.tokens = self.tokens, []
        if self._kept is not None:
            self._kept.extend(batch)
        logprobs_batch = self._take_logprobs(len(batch))
        if self._content is not None:
            token_ids, parts = self._content.finish(batch, trim_bytes)
            return *self._advance(token_ids, "", logprobs_batch), parts
        token_ids, text = self._detokenizer.finish(batch, trim_bytes) if self._detokenizer is not None else (batch, "")
        return *self._advance(token_ids, text, logprobs_batch), None

    def _take_logprobs(self, num_tokens: int) -> list[TokenLogprobs] | None:
        if self.logprobs is None:
            return None
        batch, self.logprobs = self.logprobs[:num_tokens], self.logprobs[num_tokens:]
        return batch

    def _advance(
        self, token_ids: list[int], text: str, logprobs_batch: list[TokenLogprobs] | None
    ) -> tuple[int, list[int], str, list[TokenLogprobs] | None]:
        first, self._next_token = self._next_token, self._next_token + len(token_ids)
        if logprobs_batch is None:
            return first, token_ids, text, None
        known = self._unsent_logprobs + logprobs_batch
        self._unsent_logprobs = known[len(token_ids) :]
        return first, token_ids, text, known[: len(token_ids)]

    def _append_delta(
        self,
        messages: list[bytes],
        first: int,
        token_ids: list[int],
        text: str,
        logprobs: list[TokenLogprobs] | None,
        parts: list[Part] | None,
    ) -> None:
        if token_ids or parts:
            message = self._wire.delta(self._output_index, first, token_ids, text, logprobs, parts)
            if message is not None:
                messages.append(message)
            entries = self._entries
            if entries is not None:
                entries.append(len(token_ids))
