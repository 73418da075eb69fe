"""The request by which another engine goes on with what a lost engine computed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import Request

_MAX_SERVICE_NS = 24 * 3600 * 10**9


def make(
    add: engine_pb2.AddRequest,
    emitted: Sequence[engine_pb2.EmittedTokens],
    arrival_ns: int,
    ends_ns: int,
    prompt_logprobs: Sequence[engine_pb2.PromptLogprobColumns] = (),
) -> engine_pb2.AddRequest:
    """Returns the request that goes on from what was emitted, to be sent at once.

    Args:
        add: The request as it was sent first.
        emitted: What came of each output, and how outputs ended that have; empty: nothing came.
        arrival_ns: CLOCK_MONOTONIC of the call that brought it.
        ends_ns: CLOCK_MONOTONIC at which its time is over; 0: it has no limit.
        prompt_logprobs: Log probabilities of the whole prompt, for those who read later; empty:
            those who read have them, or there are none.
    """
    further = engine_pb2.AddRequest()
    further.CopyFrom(add)
    # The key, if there is one, is this request's since an engine took it.
    further.ClearField("unasked_engines")
    further.ClearField("stands_in")
    further.emitted.extend(emitted)
    asked = Request.decode(add.request)
    further.prompt_logprobs.extend(prompt_logprobs)
    if further.emitted and asked.num_prompt_logprobs >= 0 and not prompt_logprobs:
        # The prompt's came before the first token.
        further.request = msgspec.structs.replace(asked, num_prompt_logprobs=-1).encode()
    now_ns = time.monotonic_ns()
    further.service_ns = min(now_ns - arrival_ns, _MAX_SERVICE_NS)
    if ends_ns:
        # One whose time is over ends by the engine's word.
        further.remaining_ns = max(1, ends_ns - now_ns)
    return further


def ends_ns(add: engine_pb2.AddRequest) -> int:
    """Returns when the time of a request that is sent now is over, CLOCK_MONOTONIC; 0: never."""
    return time.monotonic_ns() + add.remaining_ns if add.remaining_ns else 0
