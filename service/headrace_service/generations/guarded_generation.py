"""A submitted generation as its guardian has it: what was asked for, and what came.

Owns the copy: the request as it was sent, the ids of all tokens (4 bytes each), log probabilities
where they are asked for, how outputs ended, and how the time was spent, which is what another
engine needs to go on with it or to keep its log. Who may go on with it is the `guardian`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from collections.abc import Callable

import numpy as np

from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import Request
from headrace_service import errors
from headrace_service.engines.served_model import ServedModel
from headrace_service.generations import continuation
from headrace_service.generations.guarded_logprobs import OutputLogprobs, PromptLogprobs
from headrace_service.streams.interruptions import Interruptions
from headrace_service.streams.wires import TokenLogprobs

# What one weighs beside its request and its tokens.
_FIXED_BYTES = 2048
_TOKEN_BYTES = 4


@dataclasses.dataclass(slots=True)
class Tally:
    """What all copies of a guardian take together.

    Attributes:
        most_logprob_bytes: Log probabilities of a generation that has more are not handed over.
        num_bytes: What all take.
    """

    most_logprob_bytes: int
    num_bytes: int = 0


class GuardedGeneration:
    """One subscription of the guardian's.

    Args:
        add: the request as it is sent; of one whose guardian is gone, id and tenant alone: its
            engine says the rest.
        model: the engine that is asked for it.
        arrival_ns: CLOCK_MONOTONIC of the call that brought it.
        tally: counts the tokens that come.
        news: called with it when it has ended, and when its engine is lost.

    Attributes:
        handle: names the subscription on the engine's stream.
        add: the request as it was sent first.
        model: the engine that has it, or had it last.
        life: that engine's name for the life in which it took it.
        ended_ns: when it ended; 0 while it runs.
        accepted: whether an engine has answered that it takes it.
        is_second: whether another service guards it too, and is the first to find it an engine.
        lost_s: when its engine was lost last, CLOCK_MONOTONIC; 0: never.
        num_losses: engines that were lost with it.
        num_prompt_tokens: tokens of its prompt.
        revision: the model's, which another engine must have too.
        moving: its way to another engine, until that is decided; None: it is at an engine.
    """

    def __init__(
        self,
        add: engine_pb2.AddRequest,
        model: ServedModel,
        arrival_ns: int,
        tally: Tally,
        news: Callable[[GuardedGeneration], None],
    ) -> None:
        self.add = add
        self.model = model
        self.handle = model.engine.new_handle()
        self.life = model.engine.life
        self.ended_ns = 0
        self.accepted = False
        self.is_second = False
        self.lost_s = 0.0
        self.num_losses = 0
        self.moving: asyncio.Task[bool] | None = None
        self.revision = model.text.engine.revision
        self._tally = tally
        self._news = news
        self._arrival_ns = arrival_ns
        self._ends_ns = continuation.ends_ns(add)
        self.num_prompt_tokens = 0
        self._tokens: list[array[int]] = []
        # None: the request asks for none.
        self._logprobs: list[OutputLogprobs] | None = None
        self._prompt_logprobs = PromptLogprobs([])
        self._ends: dict[int, engine_pb2.OutputEnd] = {}
        self._done: engine_pb2.RequestDone | None = None
        self._interruptions = Interruptions(arrival_ns)
        if add.request:
            self._make_outputs()

    @property
    def request_id(self) -> str:
        """The id, which stays the same at every engine."""
        return self.add.request_id

    @property
    def done(self) -> engine_pb2.RequestDone | None:
        """The request's end."""
        return self._done

    @property
    def num_bytes(self) -> int:
        """About what the copy takes."""
        request_bytes = len(self.add.request) + len(self.add.service_state)
        return _FIXED_BYTES + request_bytes + _TOKEN_BYTES * self.num_tokens + self._num_logprob_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs that came."""
        return sum(len(tokens) for tokens in self._tokens)

    # -- the engine's side

    def push(self, output_index: int, token: int) -> None:
        """Takes one token."""
        tokens = self._tokens[output_index]
        if not tokens:
            self._interruptions.first_token(time.monotonic_ns())
        tokens.append(token)
        self._tally.num_bytes += _TOKEN_BYTES

    def push_logprobs(self, output_index: int, entry: TokenLogprobs) -> None:
        """Takes the log probabilities of the token that came last."""
        if self._logprobs is not None:
            self._tally.num_bytes += self._logprobs[output_index].append(entry)

    def note(self, event: engine_pb2.RequestEvent) -> None:
        """Takes one event."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._interruptions.started(time.monotonic_ns(), event.started.cached_tokens)
        elif kind == "prompt_logprobs":
            self._tally.num_bytes += self._prompt_logprobs.append(event.prompt_logprobs)
        elif kind == "output_end":
            self._ends[event.output_end.output_index] = event.output_end
        elif kind == "done":
            self._note_done(event.done)

    def begin_attached(self, attached: engine_pb2.Attached) -> None:
        """Takes the log of an engine that still had it."""
        self.is_second = attached.second_guardian
        num_bytes = self.num_bytes
        if attached.HasField("request") and not self.add.request:
            self._take_over(attached.request)
        if not self._tokens:
            # It ended before anybody knew what it was.
            self._done = attached.done
            return
        if attached.started:
            self._interruptions.started(time.monotonic_ns(), attached.cached_tokens)
        self._prompt_logprobs = PromptLogprobs(list(attached.prompt_logprobs))
        for log in attached.outputs:
            self._tokens[log.output_index] = array("I", np.frombuffer(log.token_ids, "<u4"))
            if self._logprobs is not None:
                self._logprobs[log.output_index] = OutputLogprobs(log.logprobs)
            if log.HasField("end"):
                self._ends[log.output_index] = log.end
        self._tally.num_bytes += self.num_bytes - num_bytes
        if attached.HasField("done"):
            self._note_done(attached.done)

    def engine_lost(self, failure: errors.ServiceError) -> None:
        """The engine is lost."""
        self.lost_s = time.monotonic()
        self._interruptions.lost(time.monotonic_ns())
        self._news(self)

    # -- another engine's

    def continuation(self) -> engine_pb2.AddRequest:
        """Returns the request by which another engine goes on, to be sent at once.

        Of one that has ended, it has that engine keep the log.
        """
        with_logprobs = self._num_logprob_bytes <= self._tally.most_logprob_bytes
        emitted = [self._emitted(index, with_logprobs) for index in range(len(self._tokens))]
        if not any(part.token_ids or part.HasField("end") for part in emitted):
            emitted = []
        earlier = self._earlier(time.monotonic_ns())
        prompt_logprobs = self._whole_prompt_logprobs() if with_logprobs else []
        further = continuation.make(self.add, emitted, self._arrival_ns, self._ends_ns, prompt_logprobs)
        further.handle = 0 if self._done is not None else self.handle
        # The lost engine had charged it to its tenant's quotas.
        further.admitted = True
        if emitted:
            further.earlier.CopyFrom(earlier)
        return further

    def _emitted(self, output_index: int, with_logprobs: bool) -> engine_pb2.EmittedTokens:
        tokens = self._tokens[output_index]
        emitted = engine_pb2.EmittedTokens(token_ids=tokens.tobytes(), end=self._ends.get(output_index))
        if self._logprobs is not None and with_logprobs:
            emitted.logprobs.CopyFrom(self._logprobs[output_index].columns())
        return emitted

    def _whole_prompt_logprobs(self) -> list[engine_pb2.PromptLogprobColumns]:
        """Returns those of the prompt if all came; others are forgotten, and computed again."""
        if self._prompt_logprobs.end < self.num_prompt_tokens:
            self._tally.num_bytes -= self._prompt_logprobs.num_bytes
            self._prompt_logprobs = PromptLogprobs([])
        return self._prompt_logprobs.parts

    @property
    def _num_logprob_bytes(self) -> int:
        return self._prompt_logprobs.num_bytes + sum(log.num_bytes for log in self._logprobs or ())

    def _earlier(self, now_ns: int) -> engine_pb2.RequestDone:
        """Returns the account of the time until now, or the end."""
        if self._done is None:
            return self._interruptions.account(now_ns)
        earlier = engine_pb2.RequestDone()
        earlier.CopyFrom(self._done)
        earlier.ended_ago_ns = now_ns - self.ended_ns
        earlier.ClearField("engine_trace")
        return earlier

    def _take_over(self, add: engine_pb2.AddRequest) -> None:
        """Takes the request of a guardian that is gone, as its engine has it."""
        self.add = add
        self._arrival_ns = time.monotonic_ns() - add.service_ns
        self._ends_ns = continuation.ends_ns(add)
        self._interruptions = Interruptions(self._arrival_ns)
        self._make_outputs()

    def _make_outputs(self) -> None:
        asked = Request.decode(self.add.request)
        self.num_prompt_tokens = len(asked.prompt_token_ids) // _TOKEN_BYTES
        self._tokens = [array("I") for _ in range(asked.n)]
        self._logprobs = [OutputLogprobs() for _ in range(asked.n)] if asked.num_logprobs >= 0 else None

    def _note_done(self, done: engine_pb2.RequestDone) -> None:
        self._done = done
        self.ended_ns = max(1, time.monotonic_ns() - done.ended_ago_ns)
        self._news(self)
