"""Tokens of a conversation's output on their way to its parts.

Owns what holds for whoever reads parts: tokens and parts cover each other, and which tokens come
together depends on the tokens alone. So each token is taken by itself, and let go once nothing that
it says waits for what follows.
"""

from __future__ import annotations

from headrace_service.output_forms.output_plan import OutputPlan
from headrace_service.output_forms.output_reader import OutputReader, merged
from headrace_service.output_forms.parts import Part
from headrace_service.text.detokenizer import IncrementalDetokenizer, PieceTable

# Tokens that wait at most for what follows them; their parts may then come with later tokens. A
# message of more might not fit.
_MAX_HELD_TOKENS = 1024


class ContentReader:
    """The parts of one output while its tokens arrive.

    Args:
        plan: what to look for.
        place: names the output, the same whoever reads it.
        table: the model's tokens.
        skip_special: whether special tokens have no text.
    """

    def __init__(self, plan: OutputPlan, place: str, table: PieceTable, skip_special: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(table, skip_special)
        self._reader = OutputReader(plan, place, not skip_special)
        self._held: list[int] = []

    @property
    def num_calls(self) -> int:
        """Calls of functions that have begun."""
        return self._reader.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._reader.num_reasoning_tokens

    def num_trimmed(self, token_ids: list[int], trim_bytes: int) -> int:
        """Returns how many of the last tokens have the bytes that `finish` cuts."""
        return self._detokenizer.num_trimmed(token_ids, trim_bytes)

    def feed(self, token_ids: list[int]) -> tuple[list[int], list[Part]]:
        """Takes the output's next tokens; returns those that are decided, and their parts."""
        decided: list[int] = []
        parts: list[Part] = []
        for token in token_ids:
            self._take(token)
            is_decided = not self._reader.holds and not self._detokenizer.num_held
            if is_decided or len(self._held) == _MAX_HELD_TOKENS:
                decided += self._held
                self._held = []
                parts += self._reader.take()
        return decided, merged(parts)

    def finish(self, token_ids: list[int], trim_bytes: int) -> tuple[list[int], list[Part]]:
        """Takes the output's last tokens; returns these and those held back, and their parts.

        Args:
            token_ids: the tokens that came with the end; may be none.
            trim_bytes: how many bytes to cut from the end.
        """
        num_whole = len(token_ids) - self.num_trimmed(token_ids, trim_bytes)
        for token in token_ids[:num_whole]:
            self._take(token)
        rest = token_ids[num_whole:]
        ids, text = self._detokenizer.finish(rest, trim_bytes)
        self._reader.feed(len(ids), text)
        self._reader.finish()
        decided, self._held = self._held + rest, []
        return decided, self._reader.take()

    def _take(self, token: int) -> None:
        self._held.append(token)
        if token in self._reader.marker_ids:
            # Half a character before a marker is none.
            ids, text = self._detokenizer.finish([])
            self._reader.feed(len(ids), text)
            self._reader.feed_marker(token)
            return
        ids, text = self._detokenizer.feed([token])
        if ids:
            self._reader.feed(len(ids), text)
