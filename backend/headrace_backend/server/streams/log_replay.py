"""What a request's further reader has missed, as messages.

The messages carry the token log, the prompt logprobs, and how each output ended.

Owns how a log that is too large for one message is cut into several. Their byte form is
`outgoing`'s; what a reader may see is in the snapshot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from headrace_backend.engine.answers import AttachSnapshot
from headrace_backend.engine.events import OutputSnapshot, PromptLogprobs
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.server.streams.outgoing import (
    EVENT_BYTES,
    ROW_BYTES,
    event_bytes,
    slice_logprobs,
    write_done,
    write_end,
    write_handover,
    write_logprobs,
    write_outbox,
    write_prompt_logprobs,
)
from headrace_protos.engine.v1 import engine_pb2


def snapshot_bytes(snapshot: AttachSnapshot) -> int:
    """About how many bytes the replay of a log takes."""
    prompt_bytes = sum(event_bytes(part) for part in snapshot.prompt_logprobs)
    return (
        prompt_bytes
        + len(snapshot.service_state)
        + sum(
            ROW_BYTES * len(output.token_ids) + (2 * output.logprobs.num_bytes if output.logprobs else 0) + EVENT_BYTES
            for output in snapshot.outputs
        )
    )


def write_attached(
    handle: int, snapshot: AttachSnapshot, now_ns: int, max_bytes: int
) -> Iterator[engine_pb2.FromEngine]:
    """The answer to an attach, within messages of about `max_bytes`.

    A log that fits comes whole in `Attached`. Of a longer one `Attached` has the heads only (no
    tokens, no ends), and the tokens follow as `StepOutputs` of the handle, in order, each output's
    end with its last tokens; before them all come the prompt logprobs.
    """
    whole = snapshot_bytes(snapshot) <= max_bytes
    attached = engine_pb2.Attached(
        handle=handle,
        service_state=snapshot.service_state,
        prompt_tokens=snapshot.prompt_tokens,
        started=snapshot.started,
        cached_tokens=snapshot.cached_tokens,
    )
    if snapshot.handover is not None:
        attached.request.CopyFrom(write_handover(snapshot.handover, now_ns))
        attached.second_guardian = snapshot.handover.is_second
    for output in snapshot.outputs:
        log = attached.outputs.add(output_index=output.output_index)
        if whole:
            _write_log(log, output)
    if whole:
        attached.prompt_logprobs.extend(map(write_prompt_logprobs, snapshot.prompt_logprobs))
    if whole and snapshot.done is not None:
        attached.done.CopyFrom(write_done(snapshot.done, now_ns))
    yield engine_pb2.FromEngine(attached=attached)
    if not whole:
        yield from _write_parts(handle, snapshot, now_ns, max_bytes)


def _write_log(log: engine_pb2.OutputLog, output: OutputSnapshot) -> None:
    log.token_ids = output.token_ids.tobytes()
    if output.logprobs is not None:
        log.logprobs.CopyFrom(write_logprobs(output.logprobs))
    if output.end is not None:
        log.end.CopyFrom(write_end(output.end))


def _write_parts(handle: int, snapshot: AttachSnapshot, now_ns: int, max_bytes: int) -> Iterator[engine_pb2.FromEngine]:
    for part in _prompt_parts(handle, snapshot.prompt_logprobs, max_bytes):
        yield write_outbox(part, now_ns)
    for output in snapshot.outputs:
        parts = list(_log_parts(handle, output, max_bytes)) or [Outbox()]
        if output.end is not None:
            # With the last tokens: they must not be rendered before it is known how much of their
            # text is cut.
            parts[-1].events = [(handle, output.end)]
        for part in parts:
            yield write_outbox(part, now_ns)
    if snapshot.done is not None:
        yield write_outbox(Outbox(events=[(handle, snapshot.done)]), now_ns)


def _prompt_parts(handle: int, parts: list[PromptLogprobs], max_bytes: int) -> Iterator[Outbox]:
    """Outboxes of about `max_bytes`, at least one part of the prompt each."""
    taken, size = Outbox(), 0
    for part in parts:
        if taken.events and size + event_bytes(part) > max_bytes:
            yield taken
            taken, size = Outbox(), 0
        taken.events.append((handle, part))
        size += event_bytes(part)
    if taken.events:
        yield taken


def _log_parts(handle: int, output: OutputSnapshot, max_bytes: int) -> Iterator[Outbox]:
    """The output's log as outboxes of about `max_bytes`, at least one token each."""
    tokens, logprobs = output.token_ids, output.logprobs
    start = top_start = 0
    while start < len(tokens):
        stop, top_stop, size = start, top_start, 0
        while stop < len(tokens) and (size < max_bytes or stop == start):
            top_count = logprobs.top_counts[stop] if logprobs is not None else 0
            size += ROW_BYTES + (14 + 8 * top_count if logprobs is not None else 0)
            stop, top_stop = stop + 1, top_stop + top_count
        count = stop - start
        part = Outbox(
            handles=array("I", [handle]) * count,
            output_indices=array("H", [output.output_index]) * count,
            tokens=tokens[start:stop],
        )
        if logprobs is not None:
            part.logprobs = slice_logprobs(logprobs, start, stop, top_start, top_stop)
            part.logprob_rows = array("I", range(count))
        yield part
        start, top_start = stop, top_stop
