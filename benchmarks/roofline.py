"""The floor: a workload served by a perfect engine that reaches its measured ceilings throughout.

Owns the time of a step and a schedule: in-flight batching with a token budget, prompts after
running rows, first come first served. A step reads all matrices (of a mixture the experts that its
tokens hit, if each chose any with equal odds) at copy bandwidth or multiplies at the matrix rate,
whichever takes longer; so does the output layer for sampled tokens; then the KV cache of the rows
that decode is read, of layers with windows no more than those, the states of rows that sample are
read and written, and the prompt tokens' attention is computed. Recurrences of prompts, launches,
sampling, norms and the host cost nothing. Ranks that share a model have an even part of all of it,
and what they tell each other costs nothing. The layers' matrix rate is that of FP8 where their
products round what they multiply to 8 bits; otherwise, and of output layer and attention, that of
the plain types. (A small model's weights may lie in caches that beat the copy bandwidth; then the
floor is none.)
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque

import numpy as np

from benchmarks.ceilings import Ceilings
from benchmarks.measurements import Request
from benchmarks.shapes import Shape
from benchmarks.workloads import Turn, Workload

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step at the ceilings."""

    shape: Shape
    ceilings: Ceilings
    bytes_per_element: int
    # Of the layers' matrices, scales and zero points included; 0: as all else.
    bits_per_weight: float = 0.0
    # Of the output layer's, likewise.
    head_bits_per_weight: float = 0.0
    # Of a token in the KV cache of all ranks, all layers, scales included; 0: of the plain type.
    kv_bytes_per_token: int = 0
    # GPUs that share the model.
    ranks: int = 1
    # Whether the layers' products round what they multiply to 8 bits.
    rounds_inputs: bool = False

    def seconds(self, tokens: int, samples: int, decode_context: int, prefill_pairs: float) -> float:
        """Seconds of one step.

        Args:
            tokens: Tokens computed.
            samples: Tokens sampled.
            decode_context: Tokens of KV cache that the decoding rows read, summed.
            prefill_pairs: Pairs of a prompt token and a token that it sees, summed.
        """
        shape, width = self.shape, self.bytes_per_element
        bandwidth, rate = self.ceilings.copy_bytes_s, self.ceilings.best_flop_s
        weight, head_weight = self.bits_per_weight / 8 or width, self.head_bits_per_weight / 8 or width
        # Of a folder with experts in MXFP4 the bits are theirs alone.
        other_weight = width if shape.mxfp4 else weight
        read = shape.layer_parameters * other_weight + shape.read_experts(tokens) * weight
        layer_rate = self.ceilings.best_8_bit_flop_s if self.rounds_inputs else rate
        layers = max(read / bandwidth, 2 * shape.multiplied_parameters * tokens / layer_rate)
        head = max(shape.head_parameters * head_weight / bandwidth, 2 * shape.head_parameters * samples / rate)
        cache = shape.seen(decode_context, samples) * (self.kv_bytes_per_token or shape.kv_elements * width) / bandwidth
        pairs = shape.seen(prefill_pairs, tokens)
        cache += 2 * shape.state_bytes * samples / bandwidth
        attention = 4 * shape.kv_layers * shape.num_heads * shape.head_dim * pairs / rate
        return (layers + (head if samples else 0.0) + cache + attention) / self.ranks


@dataclasses.dataclass(slots=True)
class _Row:
    """A request in the synthetic run."""

    prompt: int
    output: int
    start_s: float
    computed: int = 0
    arrivals_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt

    @property
    def ended(self) -> bool:
        return len(self.arrivals_s) >= self.output


class _People:
    """When users come, each after the answer before; nothing where a workload has none."""

    def __init__(self, workload: Workload, rows: list[_Row]) -> None:
        self._rows = rows
        self._turns = workload.users.turns if workload.users else ()
        self._seconds = workload.users.seconds if workload.users else 0.0
        # Row, by identity -> the turns behind it.
        self._behind = {
            id(rows[turn.index]): turns[place:] for turns in self._turns for place, turn in enumerate(turns, 1)
        }

    def first(self) -> list[_Row]:
        """Everybody's first requests, in order."""
        came = [self._begun(turns, 0.0) for turns in self._turns]
        return sorted((row for row in came if row is not None), key=lambda row: row.start_s)

    def after(self, row: _Row, now_s: float) -> _Row | None:
        """The user's request after this one has ended; None if there is none, or no time."""
        return self._begun(self._behind.get(id(row), ()), now_s)

    def _begun(self, turns: tuple[Turn, ...], now_s: float) -> _Row | None:
        if not turns or now_s + turns[0].think_s > self._seconds:
            return None
        row = self._rows[turns[0].index]
        row.start_s = now_s + turns[0].think_s
        return row


class PerfectEngine:
    """Serves one workload."""

    def __init__(self, time: StepTime, rows: int, budget: int) -> None:
        """`rows` sequences at most run at once, `budget` tokens at most are in a step."""
        self._time = time
        self._rows = rows
        self._budget = budget

    def serve(self, workload: Workload) -> list[Request]:
        """Arrival times of each token, by request, for those that are sent.

        Requests are in the trace's order; the run begins at 0.
        """
        rows = self._requests(workload)
        people = _People(workload, rows)
        waiting, running = deque(people.first() if workload.users else rows), list[_Row]()
        limit = min(self._rows, workload.concurrency or self._rows)
        closed_loop = workload.concurrency is not None
        now_s = 0.0
        while waiting or running:
            if not running:
                now_s = max(now_s, waiting[0].start_s)
            while waiting and len(running) < limit and waiting[0].start_s <= now_s:
                row = waiting.popleft()
                row.start_s = now_s if closed_loop else row.start_s
                running.append(row)
            now_s = self._step(running, now_s)
            for row in running:
                if row.ended and (later := people.after(row, now_s)) is not None:
                    # Among a thousand at most.
                    bisect.insort(waiting, later, key=lambda row: row.start_s)
            running = [row for row in running if not row.ended]
        return [Request(row.start_s, row.prompt, np.asarray(row.arrivals_s)) for row in rows if row.ended]

    @staticmethod
    def _requests(workload: Workload) -> list[_Row]:
        starts = workload.arrivals_s or (0.0,) * len(workload.trace)
        return [
            _Row(len(prompt), output, start) for (prompt, output), start in zip(workload.trace, starts, strict=True)
        ]

    def _step(self, running: list[_Row], now_s: float) -> float:
        """One step: a token for each decoding row, prompts with what the budget leaves.

        Returns its end.
        """
        decoding = [row for row in running if row.decoding]
        sampled, left, pairs = list(decoding), self._budget - len(decoding), 0.0
        for row in running:
            chunk = min(left, row.prompt - row.computed)
            if chunk <= 0:
                continue
            pairs += chunk * (row.computed + chunk / 2)
            row.computed += chunk
            left -= chunk
            sampled += [row] if row.decoding else []
        context = sum(row.prompt + len(row.arrivals_s) for row in decoding)
        end_s = now_s + self._time.seconds(self._budget - left, len(sampled), context, pairs)
        for row in sampled:
            row.arrivals_s.append(end_s)
        return end_s
