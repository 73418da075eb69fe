"""What must hold of every answer of a soak, and of the engine when all is over.

Owns the rules and their messages; each is one that a correct engine never breaks, whatever the
batch. Measures nothing itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.engine_session import Answer
from benchmarks.soak_requests import SoakRequest
from benchmarks.token_log import Tokens
from headrace_protos.engine.v1 import engine_pb2

_STOP = engine_pb2.OUTPUT_END_REASON_STOP
_LENGTH = engine_pb2.OUTPUT_END_REASON_LENGTH
_CANCELLED = engine_pb2.OUTPUT_END_REASON_CANCELLED
_DEADLINE = engine_pb2.OUTPUT_END_REASON_DEADLINE
_ABORTED = {
    engine_pb2.ABORT_CAUSE_CANCELLED: _CANCELLED,
    engine_pb2.ABORT_CAUSE_DEADLINE: _DEADLINE,
}
# Log probabilities are rounded: the certain token's may lie a little above 0.
_MOST_LOGPROB = 1e-3
# Memory that grew by more was not flat: allocators hold back less. No share of the whole, as a
# hundredth of a card's memory would hide a leak of a gigabyte.
FLAT_BYTES = 64 << 20
LEAST_SAMPLES = 8
# Descriptors that come and go by themselves.
_SPARE_DESCRIPTORS = 8
_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One thing that had to hold."""

    name: str
    ok: bool
    message: str


@dataclasses.dataclass(slots=True)
class Sent:
    """A request on its way, and afterwards what came of it."""

    index: int
    request: SoakRequest
    answer: Answer
    # What the engine said to its cancel.
    aborted: engine_pb2.Aborted | None = None

    @property
    def was_cancelled(self) -> bool:
        """It was cancelled before it ended by itself."""
        return self.aborted is not None and self.aborted.was_active


def reason_name(end: engine_pb2.OutputEnd) -> str:
    """The reason as people read it."""
    return engine_pb2.OutputEndReason.Name(end.reason).removeprefix("OUTPUT_END_REASON_").lower()


def faults_of(sent: Sent) -> list[str]:
    """What is wrong with an answer; nothing, as it should be."""
    done, prompt = sent.answer.done, sent.request.prompt
    if done is None:
        return ["has not ended"]
    try:
        outputs = sent.answer.outputs(prompt.n)
    except ValueError as error:
        return [str(error)]
    ended = [end.output_index for end in sent.answer.ends]
    if sorted(ended) != list(range(prompt.n)):
        return [f"{prompt.n} outputs; ends came for {ended}"]
    faults = [fault for end in sent.answer.ends for fault in _output_faults(sent, end, outputs[end.output_index])]
    num_tokens = sum(map(len, outputs))
    if (done.prompt_tokens, done.output_tokens) != (prompt.num_tokens, num_tokens):
        faults.append(
            f"{prompt.num_tokens} -> {num_tokens} tokens; usage says {done.prompt_tokens} -> {done.output_tokens}"
        )
    if done.cached_tokens >= prompt.num_tokens:
        faults.append(f"{done.cached_tokens} of {prompt.num_tokens} prompt tokens cached: none was left to compute")
    if sent.aborted is not None and not sent.aborted.found:
        faults.append("its cancel found no such request")
    return faults + list(_logprob_faults(sent, num_tokens))


def _output_faults(sent: Sent, end: engine_pb2.OutputEnd, tokens: Tokens) -> Iterator[str]:
    request = sent.request
    most, least = request.prompt.max_tokens, request.prompt.min_tokens
    count = len(tokens)
    stops = [place for place in range(least, count) if int(tokens[place]) in request.stop_ids]
    if end.reason == _LENGTH and count != most:
        yield f"ended by its length after {count} of {most} tokens"
    elif end.reason == _STOP and (stops != [count - 1] or end.stop_token_id != int(tokens[-1])):
        yield f"ended by stop {end.stop_token_id} after {count} tokens; stops are at {stops}, from {least} on"
    elif end.reason in (_CANCELLED, _DEADLINE):
        yield from _cancel_faults(sent, end, count)
    elif end.reason not in (_LENGTH, _STOP):
        yield f"ended by {reason_name(end)}: {end.error.message}"
    if end.reason != _STOP and stops:
        yield f"went on after a stop token at {stops[0]}"
    yield from _token_faults(request, tokens.tolist())


def _cancel_faults(sent: Sent, end: engine_pb2.OutputEnd, count: int) -> Iterator[str]:
    cancel = sent.request.cancel
    if cancel is None or not sent.was_cancelled or end.reason != _ABORTED[cancel.cause]:
        yield f"ended by {reason_name(end)}, for which nobody asked"
    if count >= sent.request.prompt.max_tokens:
        yield f"was cancelled with all its {count} tokens"


def _token_faults(request: SoakRequest, tokens: list[int]) -> Iterator[str]:
    if request.allowed and not request.allowed.issuperset(tokens):
        yield f"token {min(set(tokens) - request.allowed)} against a bias of 100 for others"
    for word in request.banned:
        if any(tuple(tokens[place : place + len(word)]) == word for place in range(len(tokens))):
            yield f"banned tokens {word}"


def _logprob_faults(sent: Sent, num_tokens: int) -> Iterator[str]:
    logprobs, wanted = sent.answer.logprobs, sent.request.prompt.logprobs
    count = len(logprobs.sampled)
    if count != (0 if wanted is None else num_tokens):
        yield f"{count} log probabilities for {num_tokens} tokens"
    elif count:
        valid = np.isfinite(logprobs.sampled) & (logprobs.sampled <= _MOST_LOGPROB) & (logprobs.ranks >= 1)
        if not valid.all():
            place = int(np.argmin(valid))
            yield f"log probability {logprobs.sampled[place]} of rank {logprobs.ranks[place]}"
        # Banned tokens are no top tokens, but there are others.
        if (logprobs.top_counts != wanted).any():
            yield f"{sorted(set(logprobs.top_counts.tolist()))} top tokens, {wanted} asked for"


def answers_check(everything: Sequence[Sent]) -> Check:
    """Every request ended in one way, with the tokens that it had to have."""
    faults = [
        f"request {sent.index} ({sent.request.kind}): {fault}" for sent in everything for fault in faults_of(sent)
    ]
    message = "; ".join(faults[:_SHOWN]) + (f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")
    return Check("answers", not faults, message or f"{len(everything)} requests, each ended once and as it had to")


def engine_checks(load: engine_pb2.Load) -> list[Check]:
    """The engine after the last answer."""
    rows = load.running_sequences + load.waiting_requests
    resting = load.free_blocks + load.cached_blocks
    return [
        Check("late work", load.late_work == 0, f"{load.late_work} kernels compiled or graphs captured after warm-up"),
        Check("queue", rows == 0, f"{load.running_sequences} running, {load.waiting_requests} waiting"),
        Check(
            "blocks",
            load.used_blocks == 0 and resting == load.kv_blocks > 0,
            f"{load.used_blocks} used, {load.free_blocks} free + {load.cached_blocks} cached of {load.kv_blocks}",
        ),
    ]


def growth_bytes(samples: Sequence[int]) -> int:
    """How far the last quarter's maximum is above the second quarter's."""
    quarter = len(samples) // 4
    return max(samples[-quarter:]) - max(samples[quarter : 2 * quarter])


def memory_check(name: str, samples: Sequence[int]) -> Check:
    """Whether memory was flat, once the first quarter had filled what is filled."""
    if len(samples) < LEAST_SAMPLES:
        return Check(f"{name} memory", False, f"{len(samples)} samples; {LEAST_SAMPLES} are needed to tell")
    growth = growth_bytes(samples)
    message = (
        f"{max(samples) / 2**30:.3f} GiB at most; last quarter {growth / 2**20:+.1f} MiB from the second, "
        f"{FLAT_BYTES >> 20} allowed"
    )
    return Check(f"{name} memory", growth <= FLAT_BYTES, message)


def descriptors_check(before: int, after: int) -> Check:
    """Whether files and sockets were closed."""
    return Check("descriptors", after <= before + _SPARE_DESCRIPTORS, f"{before} before, {after} after")


def same_check(name: str, before: object, after: object, said: str) -> Check:
    """Something that must not have changed."""
    return Check(name, before == after, said if before == after else f"{before} before, {after} after")
