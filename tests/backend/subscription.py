"""What a backend sent to one handle of a stream, put together as it arrives."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
from google.rpc import status_pb2

from headrace_protos.engine.v1 import engine_pb2


@dataclasses.dataclass
class Subscription:
    """What arrived for one handle."""

    handle: int
    request_id: str = ""
    added: engine_pb2.Added | None = None
    attached: engine_pb2.Attached | None = None
    refused: status_pb2.Status | None = None
    started: bool = False
    resumed: int = 0
    ends: dict[int, engine_pb2.OutputEnd] = dataclasses.field(default_factory=dict)
    outputs: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    logprobs: list[tuple[float, list[int]]] = dataclasses.field(default_factory=list)
    # Of the prompt's tokens from position 1 on.
    prompt: list[tuple[float, int, list[int]]] = dataclasses.field(default_factory=list)
    done: engine_pb2.RequestDone | None = None
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    num_messages: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.outputs.get(0, [])

    def take_prompt(self, part: engine_pb2.PromptLogprobColumns) -> None:
        assert part.first_token_index == 1 + len(self.prompt), "parts come in order, without gaps"
        columns = part.columns
        tops = iter(np.frombuffer(columns.top_token_ids, "<u4").tolist())
        for sampled, rank, count in zip(
            np.frombuffer(columns.sampled, "<f4").tolist(),
            np.frombuffer(columns.ranks, "<u4").tolist(),
            np.frombuffer(columns.top_counts, "<u2").tolist(),
            strict=True,
        ):
            self.prompt.append((sampled, rank, [next(tops) for _ in range(count)]))
        assert next(tops, None) is None
