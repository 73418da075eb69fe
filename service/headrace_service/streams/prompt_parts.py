"""The log probabilities of a prompt on their way to a reader: parts in order, none twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.streams.engine_columns import cut, num_tokens_of, part

# Of a prompt, in one event: at most 190 bytes each, so that the event fits the smallest limit of a
# message, 64 KiB.
_MAX_TOKENS = 256


class PromptParts:
    """Parts that wait for the reader."""

    __slots__ = ("_next_index", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[engine_pb2.PromptLogprobColumns] = []
        # The first token of a prompt has no log probability.
        self._next_index = 1

    def __bool__(self) -> bool:
        """Whether some wait."""
        return bool(self._waiting)

    def append(self, prompt: engine_pb2.PromptLogprobColumns) -> int:
        """Takes what follows of a part; returns its bytes.

        An engine that takes the place of one that was lost may begin the prompt anew.
        """
        num_known, num_tokens = self._next_index - prompt.first_token_index, num_tokens_of(prompt.columns)
        if num_known >= num_tokens:
            return 0
        if num_known > 0:
            columns = part(prompt.columns, num_known, num_tokens)
            prompt = engine_pb2.PromptLogprobColumns(first_token_index=self._next_index, columns=columns)
        self._next_index = prompt.first_token_index + num_tokens_of(prompt.columns)
        self._waiting.append(prompt)
        return prompt.ByteSize()

    def extend(self, prompts: Iterable[engine_pb2.PromptLogprobColumns]) -> None:
        """Takes several parts."""
        for prompt in prompts:
            self.append(prompt)

    def take(self) -> Iterator[tuple[int, engine_pb2.LogprobColumns]]:
        """Yields what waits as runs that fit a message: the first token's index, and columns."""
        waiting, self._waiting = self._waiting, []
        for prompt in waiting:
            for num_before, columns in cut(prompt.columns, _MAX_TOKENS):
                yield prompt.first_token_index + num_before, columns
