"""An engine, a fake worker and a reader, driven by hand with a clock of their own."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
import numpy as np
from tests.engine.drafting_worker import DraftingWorker
from tests.engine.fake_worker import VOCAB_SIZE, FakeWorker

from headrace_backend.cache_groups import ONE_GROUP, CacheGroup
from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.events import (
    Event,
    LogprobColumns,
    OutputEnd,
    PromptLogprobs,
    RequestDone,
    Resumed,
    Started,
)
from headrace_backend.engine.request import EngineRequest, ModelLimits, Subscriber
from headrace_backend.step.plan_bytes import columns_bytes, max_plan_bytes
from headrace_request.request import Request
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop

# Events that come before the tokens of their outbox.
PRECEDING = (Started, PromptLogprobs)
EOS = 0
STREAM = 1
# Short texts, so that stop strings fall within, at and across borders of tokens; one token without
# text.
TOKEN_BYTES = [b"", *(b"ab" if t % 5 == 0 else b"abc"[t % 3 : t % 3 + 1] * (1 + t % 2) for t in range(1, VOCAB_SIZE))]


def config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": pathlib.Path("model"),
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        # A number of drafts is for those who draft; with none of these plans have a row's history.
        **({"speculate": "mtp"} if "speculate_tokens" in changes else {}),
        **changes,
    }
    return EngineConfig(**values)


_ids = itertools.count(1)


def request(prompt: list[int] | int, max_tokens: int = 8, **changes: Any) -> EngineRequest:
    """A request; a prompt of a given length, or these tokens.

    Sampling and stop fields go by their names.
    """
    if isinstance(prompt, int):
        prompt = [1 + (7 * i + prompt) % (VOCAB_SIZE - 1) for i in range(prompt)]
    sampling = _taken(changes, Sampling)
    sampling["bad_words"] = tuple(np.array(word, np.int32).tobytes() for word in sampling.pop("bad_words", ()))
    stop = _taken(changes, Stop)
    stop["token_ids"] = np.array(sorted(stop.pop("token_ids", ())), np.int32).tobytes()
    asked = Request(
        prompt_token_ids=changes.pop("prompt_token_ids", np.array(prompt, np.int32).tobytes()),
        sampling=Sampling(**sampling),
        stop=Stop(max_tokens=max_tokens, **stop),
        **_taken(changes, Request),
    )
    return EngineRequest(request_id=changes.pop("request_id", f"r{next(_ids)}"), asked=asked, **changes)


def _taken(changes: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Takes a struct's fields out of the changes."""
    return {name: changes.pop(name) for name in struct.__struct_fields__ if name in changes}


@dataclasses.dataclass
class Reader:
    """What one subscription has received, output by output."""

    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    # Per token: its log probability, its rank, the most likely tokens.
    logprobs: list[tuple[float, int, list[int]]] = dataclasses.field(default_factory=list)
    # The same of the prompt's second token and those after it.
    prompt: list[tuple[float, int, list[int]]] = dataclasses.field(default_factory=list)
    ends: dict[int, OutputEnd] = dataclasses.field(default_factory=dict)
    events: list[Event] = dataclasses.field(default_factory=list)
    started: Started | None = None
    resumed: list[Resumed] = dataclasses.field(default_factory=list)
    done: RequestDone | None = None

    def take(self, event: Event) -> None:
        assert self.done is None, "nothing follows the end"
        self.events.append(event)
        if isinstance(event, Started):
            assert self.started is None, "a request starts once"
            self.started = event
        elif isinstance(event, PromptLogprobs):
            assert self.started is not None and not self.tokens, (
                "the prompt comes between the start and the first token"
            )
            assert event.first_token_index == 1 + len(self.prompt), "parts are in order and have no gaps"
            assert len(event.columns) > 0
            self.prompt.extend(logprob_entries(event.columns))
        elif isinstance(event, OutputEnd):
            assert event.output_index not in self.ends, "an output ends once"
            self.ends[event.output_index] = event
        elif isinstance(event, Resumed):
            self.resumed.append(event)
        else:
            self.done = event


def logprob_entries(columns: LogprobColumns) -> list[tuple[float, int, list[int]]]:
    """One entry per token."""
    entries = []
    first = 0
    for sampled, rank, count in zip(columns.sampled, columns.ranks, columns.top_counts, strict=True):
        top_logprobs = list(columns.top_logprobs[first : first + count])
        entries.append((sampled, rank, list(columns.top_token_ids[first : first + count])))
        # What nobody drew has all of the probability; of others the fake worker says this.
        is_forced = (sampled, rank) == (0.0, 1)
        assert top_logprobs == [0.0 if is_forced else -float(token) for token in entries[-1][2]]
        first += count
    assert first == len(columns.top_token_ids) == len(columns.top_logprobs)
    return entries


class Harness:
    """Everything in one place; `step` is one turn of the server's loop."""

    token_bytes: list[bytes] | None = TOKEN_BYTES

    def __init__(
        self,
        num_blocks: int = 64,
        model_len: int = 512,
        plan_bytes: int | None = None,
        attention_window: int | None = None,
        tokens_per_row: int | None = None,
        groups: tuple[CacheGroup, ...] = ONE_GROUP,
        worker: FakeWorker | None = None,
        num_checkpoints: int = 0,
        **changes: Any,
    ) -> None:
        """`plan_bytes` is what the worker's ring takes; None: what the configuration makes of it.

        With `tokens_per_row` the worker drafts, and settles `choose_count` of so many tokens.
        """
        self.now_ns = 1_000_000_000
        self.config = config(**changes)
        self.num_blocks, self.num_checkpoints = num_blocks, num_checkpoints
        self.groups = groups
        self.plan_bytes = plan_bytes or max_plan_bytes(self.config, model_len, len(groups))
        limits = self.model_limits(model_len, attention_window)
        self.engine = Engine(self.config, limits, self.token_bytes, lambda: self.now_ns, lambda: self.now_ns)
        self.attention_window = attention_window
        self.tokens_per_row = tokens_per_row
        self.choose_count: Callable[[int], int] = lambda most: most
        self.worker = worker or self.new_worker()
        about_cache = {"tokens_per_row": tokens_per_row or 1, "num_checkpoints": num_checkpoints}
        self.engine.worker_ready(num_blocks, plan_bytes=plan_bytes, **about_cache)
        self.readers: dict[tuple[int, int], Reader] = {}
        self._handles = itertools.count(1)

    def model_limits(self, model_len: int, attention_window: int | None) -> ModelLimits:
        return ModelLimits(VOCAB_SIZE, model_len, (EOS,), attention_window, self.groups)

    def new_worker(self) -> FakeWorker:
        config = self.config
        sizes = (self.num_blocks, config.block_size, config.max_num_batched_tokens, config.max_num_seqs)
        if self.tokens_per_row is not None:
            worker: FakeWorker = DraftingWorker(*sizes, lambda most: self.choose_count(most), self.groups)
        else:
            worker = FakeWorker(*sizes, self.groups)
        worker.plan_bytes, worker.column_bytes = self.plan_bytes, columns_bytes(config, len(self.groups))
        worker.attention_window = self.attention_window
        return worker

    def replace_worker(self, pause_ns: int = 1_000) -> None:
        self.engine.worker_lost()
        self.now_ns += pause_ns
        self.worker = self.new_worker()
        about_cache = {"tokens_per_row": self.tokens_per_row or 1, "num_checkpoints": self.num_checkpoints}
        self.engine.worker_ready(self.num_blocks, **about_cache)

    def subscriber(self, stream_id: int = STREAM) -> Subscriber:
        return Subscriber(stream_id, next(self._handles))

    def add(self, spec: EngineRequest, stream_id: int = STREAM) -> Reader:
        subscriber = self.subscriber(stream_id)
        reader = self.readers[subscriber] = Reader()
        try:
            self.engine.add(spec, subscriber)
        except BaseException:
            del self.readers[subscriber]
            raise
        return reader

    def plan(self) -> bool:
        """Plans as far ahead as the engine goes, then reads."""
        planned = False
        while (plan := self.engine.plan()) is not None:
            self.worker.push(plan)
            planned = True
        self.read()
        return planned

    def settle(self) -> None:
        """Runs and settles the oldest step, then reads."""
        self.now_ns += 1_000
        self.engine.settle(self.worker.run())
        self.read()

    def step(self) -> None:
        self.plan()
        if self.worker.plans:
            self.settle()

    def checked_step(self) -> None:
        self.step()
        self.engine.check_integrity()

    def serve(
        self,
        arrivals: Iterable[tuple[EngineRequest, int]],
        deaths: Collection[int] = (),
        step: Callable[[], None] | None = None,
    ) -> list[tuple[EngineRequest, Reader]]:
        """Adds requests, each with so many steps after it, then runs until nothing is left.

        Before the steps whose numbers are in `deaths` the worker dies.
        """
        readers = []
        numbers = itertools.count(1)
        for spec, pause in arrivals:
            readers.append((spec, self.add(spec)))
            for number in itertools.islice(numbers, pause):
                if number in deaths:
                    self.replace_worker()
                (step or self.checked_step)()
        self.run()
        return readers

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.plan()
            if self.engine.has_work:
                assert self.worker.plans, "there is work, but nothing is planned"
                self.settle()
        assert not self.engine.has_work, "some request does not end"
        while self.worker.plans:
            self.settle()
        self.engine.check_integrity()

    def read(self) -> None:
        for stream_id, outbox in self.engine.take_outboxes().items():
            for handle, event in outbox.events:
                if isinstance(event, PRECEDING):
                    self.readers[stream_id, handle].take(event)
            columns = zip(outbox.handles, outbox.output_indices, outbox.tokens, strict=True)
            for handle, output_index, token in columns:
                reader = self.readers[stream_id, handle]
                assert output_index not in reader.ends, "no token follows the end of its output"
                reader.tokens.setdefault(output_index, []).append(token)
            for row, entry in zip(outbox.logprob_rows, logprob_entries(outbox.logprobs), strict=True):
                self.readers[stream_id, outbox.handles[row]].logprobs.append(entry)
            for handle, event in outbox.events:
                if not isinstance(event, PRECEDING):
                    self.readers[stream_id, handle].take(event)
