"""The prompt at the beginning of a completion, with its log probabilities.

Owns the order of the two: the engine reports a prompt's log probabilities in runs, from its second
token on, before the first token of the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace_protos.engine.v1 import engine_pb2
from headrace_service.streams.engine_columns import LogprobReader
from headrace_service.streams.wires import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that each output begins with.

    Attributes:
        text: the prompt.
        token_ids: its tokens.
        with_logprobs: whether their log probabilities are reported.
        only: whether the output itself is left out.
    """

    text: str
    token_ids: Sequence[int]
    with_logprobs: bool
    only: bool

    @property
    def is_whole_at_once(self) -> bool:
        """Whether nothing of the prompt has to be waited for."""
        return not self.with_logprobs or len(self.token_ids) == 1

    def run(
        self, first_token_index: int, columns: engine_pb2.LogprobColumns
    ) -> tuple[str, Sequence[int], list[TokenLogprobs | None]]:
        """Returns text, tokens and log probabilities of a run.

        The first run has the first token, which has none, and all of the text.
        """
        reader, count = LogprobReader(columns), len(columns.ranks) // 4
        logprobs: list[TokenLogprobs | None] = [reader.next() for _ in range(count)]
        tokens = self.token_ids[first_token_index : first_token_index + count]
        if first_token_index > 1:
            return "", tokens, logprobs
        return self.text, [self.token_ids[0], *tokens], [None, *logprobs]
