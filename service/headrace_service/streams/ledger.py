"""The service's part of a request's ledger.

Owns the two parts that the engine cannot know: the time from the last token in the engine to its
delivery, split into our own work and the reader's. The engine's parts (queued to engine_restart)
begin at the arrival of the call, because `AddRequest.service_ns` tells the engine how long the
service had it before. All parts add up to end_to_end exactly.
"""

from __future__ import annotations

import dataclasses

from headrace.v1 import generation_pb2
from headrace_protos.engine.v1 import engine_pb2


@dataclasses.dataclass(slots=True)
class DeliveryClock:
    """When a stream's messages left, in CLOCK_MONOTONIC nanoseconds.

    Attributes:
        arrival_ns: when the call arrived.
        subscribed: whether the call reads a generation that an earlier one started.
        first_left_ns: when the first message with a token had left; 0: none has.
        ended_ns: when the generation ended in the engine; 0 while it runs.
        blocked_ns: time spent waiting for the reader since then.
    """

    arrival_ns: int
    subscribed: bool
    first_left_ns: int = 0
    ended_ns: int = 0
    blocked_ns: int = 0

    def generation_ended(self, now_ns: int, ended_ago_ns: int) -> None:
        """Notes the end of the generation, as the engine reported it."""
        self.ended_ns = max(now_ns - ended_ago_ns, 1)

    def wrote(self, begin_ns: int, end_ns: int) -> None:
        """Notes one write that waited for the reader.

        Only what lies after the generation's end counts.
        """
        if self.ended_ns:
            self.blocked_ns += max(0, end_ns - max(begin_ns, self.ended_ns, self.arrival_ns))


def close(done: engine_pb2.RequestDone, clock: DeliveryClock, now_ns: int) -> generation_pb2.Ledger:
    """Returns the whole ledger of a request whose Done is about to be sent at `now_ns`."""
    engine_ns = done.queued_ns + done.prefill_ns + done.decode_ns + done.preempted_ns + done.engine_restart_ns
    if clock.subscribed:
        delivery_ns = max(0, now_ns - max(clock.ended_ns, clock.arrival_ns))
    else:
        delivery_ns = max(0, now_ns - clock.arrival_ns - engine_ns)
    blocked_ns = min(clock.blocked_ns, delivery_ns)
    return generation_pb2.Ledger(
        queued_ns=done.queued_ns,
        prefill_ns=done.prefill_ns,
        decode_ns=done.decode_ns,
        preempted_ns=done.preempted_ns,
        engine_restart_ns=done.engine_restart_ns,
        detokenize_and_send_ns=delivery_ns - blocked_ns,
        blocked_on_reader_ns=blocked_ns,
        end_to_end_ns=engine_ns + delivery_ns,
        ttft_ns=done.ttft_ns,
        step_count=done.step_count,
        preemptions=done.preemptions,
        cached_tokens=done.cached_tokens,
        draft_tokens=done.draft_tokens,
        accepted_tokens=done.accepted_tokens,
    )
