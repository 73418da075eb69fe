"""From the engine's plain data to protobuf: what a service receives.

Owns the byte form of outboxes, which are merged while a service lags, and of answers; that of a log
which is sent anew is `log_replay`'s. Decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import grpc
from google.rpc import status_pb2

from headrace_backend.engine.answers import Handover, LoadReport, LoadSnapshot, RequestPage
from headrace_backend.engine.errors import RequestRefused
from headrace_backend.engine.events import (
    EndReason,
    Event,
    LogprobColumns,
    OutputEnd,
    PromptLogprobs,
    RequestDone,
    Resumed,
    Started,
)
from headrace_backend.engine.request import LOGPROB_BYTES, TOP_LOGPROB_BYTES
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.server.health import STALE_AFTER_NS, HealthState
from headrace_backend.server.streams.statuses import make_status, refusal_status
from headrace_protos.engine.v1 import engine_pb2

# About what a token's row and an event take, here and on the wire.
ROW_BYTES = 10
EVENT_BYTES = 96

_END_REASONS = {
    EndReason.STOP: engine_pb2.OUTPUT_END_REASON_STOP,
    EndReason.LENGTH: engine_pb2.OUTPUT_END_REASON_LENGTH,
    EndReason.CANCELLED: engine_pb2.OUTPUT_END_REASON_CANCELLED,
    EndReason.DEADLINE: engine_pb2.OUTPUT_END_REASON_DEADLINE,
    EndReason.ERROR: engine_pb2.OUTPUT_END_REASON_ERROR,
}


def outbox_bytes(outbox: Outbox) -> int:
    """About how many bytes an outbox takes, here and on the wire."""
    size = ROW_BYTES * len(outbox.tokens) + 2 * outbox.logprobs.num_bytes
    return size + sum([event_bytes(event) for _, event in outbox.events])


def event_bytes(event: Event) -> int:
    """About how many bytes an event takes."""
    if isinstance(event, PromptLogprobs):
        return EVENT_BYTES + event.columns.num_bytes
    return EVENT_BYTES + (len(event.engine_trace) if isinstance(event, RequestDone) else 0)


def merge_outbox(into: Outbox, later: Outbox) -> None:
    """Appends a later outbox of the same stream."""
    first_row = len(into.tokens)
    into.handles.extend(later.handles)
    into.output_indices.extend(later.output_indices)
    into.tokens.extend(later.tokens)
    if later.logprob_rows:
        into.logprob_rows.extend(array("I", [first_row + row for row in later.logprob_rows]))
        _extend_logprobs(into.logprobs, later.logprobs)
    into.events.extend(later.events)
    if later.step_id:
        into.step_id, into.planned_at_ns, into.settled_at_ns = later.step_id, later.planned_at_ns, later.settled_at_ns
        into.batch_sequences, into.batch_tokens = later.batch_sequences, later.batch_tokens


def split_outbox(outbox: Outbox, max_bytes: int) -> Iterator[Outbox]:
    """Splits an outbox into several of about `max_bytes`.

    Each has all that some of the handles are sent, in its order.

    A handle is in one part, which reports the end of an output with its last tokens. What one
    handle is sent always fits.
    """
    part_of = _assign_parts(_bytes_by_handle(outbox), max_bytes)
    parts = [_empty_part(outbox) for _ in range(1 + max(part_of.values(), default=0))]
    columns, reported = outbox.logprobs, set(outbox.logprob_rows)
    entry = top = 0
    for row, (handle, output, token) in enumerate(
        zip(outbox.handles, outbox.output_indices, outbox.tokens, strict=True)
    ):
        part = parts[part_of[handle]]
        if row in reported:
            part.logprob_rows.append(len(part.tokens))
            next_top = top + columns.top_counts[entry]
            _extend_logprobs(part.logprobs, slice_logprobs(columns, entry, entry + 1, top, next_top))
            entry, top = entry + 1, next_top
        part.handles.append(handle)
        part.output_indices.append(output)
        part.tokens.append(token)
    for handle, event in outbox.events:
        parts[part_of[handle]].events.append((handle, event))
    yield from parts


def _bytes_by_handle(outbox: Outbox) -> dict[int, int]:
    """About how many bytes each handle is sent, handles as they come."""
    sizes: dict[int, int] = {}
    for handle in outbox.handles:
        sizes[handle] = sizes.get(handle, 0) + ROW_BYTES
    for row, count in zip(outbox.logprob_rows, outbox.logprobs.top_counts, strict=True):
        sizes[outbox.handles[row]] += 2 * (LOGPROB_BYTES + TOP_LOGPROB_BYTES * count)
    for handle, event in outbox.events:
        sizes[handle] = sizes.get(handle, 0) + event_bytes(event)
    return sizes


def _assign_parts(sizes: dict[int, int], max_bytes: int) -> dict[int, int]:
    """The part that each handle goes to: as many handles to a part as fit, at least one."""
    part_of: dict[int, int] = {}
    part = size = 0
    for handle, handle_bytes in sizes.items():
        if size and size + handle_bytes > max_bytes:
            part, size = part + 1, 0
        part_of[handle] = part
        size += handle_bytes
    return part_of


def _empty_part(outbox: Outbox) -> Outbox:
    """An outbox of the same step."""
    return Outbox(
        step_id=outbox.step_id,
        planned_at_ns=outbox.planned_at_ns,
        settled_at_ns=outbox.settled_at_ns,
        batch_sequences=outbox.batch_sequences,
        batch_tokens=outbox.batch_tokens,
    )


def slice_logprobs(columns: LogprobColumns, start: int, stop: int, top_start: int, top_stop: int) -> LogprobColumns:
    """Returns the columns of tokens [start, stop), with top entries [top_start, top_stop)."""
    return LogprobColumns(
        sampled=columns.sampled[start:stop],
        ranks=columns.ranks[start:stop],
        top_counts=columns.top_counts[start:stop],
        top_token_ids=columns.top_token_ids[top_start:top_stop],
        top_logprobs=columns.top_logprobs[top_start:top_stop],
    )


def _extend_logprobs(into: LogprobColumns, later: LogprobColumns) -> None:
    into.sampled.extend(later.sampled)
    into.ranks.extend(later.ranks)
    into.top_counts.extend(later.top_counts)
    into.top_token_ids.extend(later.top_token_ids)
    into.top_logprobs.extend(later.top_logprobs)


def write_outbox(outbox: Outbox, now_ns: int, step_records: bytes = b"") -> engine_pb2.FromEngine:
    """Writes the `StepOutputs` of an outbox.

    If the service asked for them, records of all steps settled since the last one are included.
    """
    step = engine_pb2.StepOutputs(
        step_id=outbox.step_id,
        handles=outbox.handles.tobytes(),
        output_indices=outbox.output_indices.tobytes(),
        tokens=outbox.tokens.tobytes(),
        planned_at_ns=outbox.planned_at_ns,
        settled_at_ns=outbox.settled_at_ns,
        batch_sequences=outbox.batch_sequences,
        batch_tokens=outbox.batch_tokens,
        step_records=step_records,
    )
    if outbox.logprob_rows:
        step.logprobs.CopyFrom(write_logprobs(outbox.logprobs))
        step.logprob_rows = outbox.logprob_rows.tobytes()
    for handle, event in outbox.events:
        _write_event(step.events.add(handle=handle), event, now_ns)
    return engine_pb2.FromEngine(step=step)


def write_logprobs(columns: LogprobColumns) -> engine_pb2.LogprobColumns:
    """Writes columns as packed bytes."""
    return engine_pb2.LogprobColumns(
        sampled=columns.sampled.tobytes(),
        ranks=columns.ranks.tobytes(),
        top_counts=columns.top_counts.tobytes(),
        top_token_ids=columns.top_token_ids.tobytes(),
        top_logprobs=columns.top_logprobs.tobytes(),
    )


def _write_event(target: engine_pb2.RequestEvent, event: Event, now_ns: int) -> None:
    if isinstance(event, Started):
        target.started.cached_tokens = event.cached_tokens
        # A message whose only field is 0 must still be there.
        target.started.SetInParent()
    elif isinstance(event, PromptLogprobs):
        target.prompt_logprobs.CopyFrom(write_prompt_logprobs(event))
    elif isinstance(event, Resumed):
        target.resumed.pause_ns = event.pause_ns
        target.resumed.SetInParent()
    elif isinstance(event, OutputEnd):
        target.output_end.CopyFrom(write_end(event))
    else:
        target.done.CopyFrom(write_done(event, now_ns))


def write_prompt_logprobs(part: PromptLogprobs) -> engine_pb2.PromptLogprobColumns:
    """The log probabilities of a run of prompt tokens."""
    return engine_pb2.PromptLogprobColumns(
        first_token_index=part.first_token_index, columns=write_logprobs(part.columns)
    )


def write_end(end: OutputEnd) -> engine_pb2.OutputEnd:
    """Writes how one output ended."""
    return engine_pb2.OutputEnd(
        output_index=end.output_index,
        reason=_END_REASONS[end.reason],
        stop_token_id=end.stop_token_id,
        stop_string_index=end.stop_string_index,
        trim_bytes=end.trim_bytes,
        error=_error(end),
        score=end.score,
    )


def _error(end: OutputEnd) -> status_pb2.Status | None:
    """What went wrong with an output; None: nothing.

    Its request can't be met, or no more, or the engine failed.
    """
    if end.broken is not None:
        return refusal_status(RequestRefused.invalid([end.broken]))
    if end.unfit:
        return make_status(grpc.StatusCode.RESOURCE_EXHAUSTED, end.unfit)
    return make_status(grpc.StatusCode.INTERNAL, end.error) if end.error else None


def write_handover(handover: Handover, now_ns: int) -> engine_pb2.AddRequest:
    """The request that a guardian hands to another engine, as of now."""
    request, limits = handover.request, handover.request.limits
    add = engine_pb2.AddRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        request=request.asked.encode(),
        remaining_ns=max(1, handover.deadline_ns - now_ns),
        service_ns=now_ns - handover.asked_at_ns,
        detached=True,
        idempotency_key=request.idempotency_key,
        spec_digest=request.spec_digest,
        service_state=request.service_state,
        limits=engine_pb2.TenantLimits(**limits._asdict()),
    )
    span, recording = request.span, request.recording
    if span is not None and recording is not None:
        add.traceparent = f"00-{span.trace_id}-{span.span_id}-{int(span.sampled):02x}"
        add.recording.CopyFrom(
            engine_pb2.Recording(
                parent_span_id=span.parent_span_id,
                tracestate=span.tracestate,
                detail=recording.detail,
                operation=recording.operation,
                wire=recording.wire,
            )
        )
    return add


def write_done(done: RequestDone, now_ns: int) -> engine_pb2.RequestDone:
    """Usage and ledger of a request that has ended.

    Times are given as how long ago, as clocks of two machines differ.
    """
    return engine_pb2.RequestDone(
        prompt_tokens=done.prompt_tokens,
        output_tokens=done.output_tokens,
        cached_tokens=done.cached_tokens,
        queued_ns=done.queued_ns,
        prefill_ns=done.prefill_ns,
        decode_ns=done.decode_ns,
        preempted_ns=done.preempted_ns,
        engine_restart_ns=done.engine_restart_ns,
        ttft_ns=done.ttft_ns,
        step_count=done.step_count,
        preemptions=done.preemptions,
        draft_tokens=done.draft_tokens,
        accepted_tokens=done.accepted_tokens,
        ended_ago_ns=max(now_ns - done.ended_at_ns, 0),
        engine_trace=done.engine_trace,
    )


def write_state(state: HealthState, load: LoadReport) -> engine_pb2.EngineState:
    """The engine's state as services see it."""
    return engine_pb2.EngineState(
        serving=state.serving,
        reason=state.reason,
        stale_after_ns=STALE_AFTER_NS,
        load=engine_pb2.EngineLoad(
            prefill_tokens=load.prefill_tokens,
            prefill_tokens_per_second=load.prefill_tokens_per_s,
            open_requests=load.open_requests,
            rows=load.rows,
            row_time_ns=load.row_time_ns,
        ),
    )


def write_load(query_id: int, load: LoadSnapshot) -> engine_pb2.FromEngine:
    """The answer to a LoadQuery."""
    return engine_pb2.FromEngine(
        load=engine_pb2.Load(
            query_id=query_id,
            running_sequences=load.running_sequences,
            waiting_requests=load.waiting_requests,
            waiting_tokens=load.waiting_tokens,
            kv_cache_usage=load.kv_cache_usage,
            kv_blocks=load.kv_blocks,
            max_waiting_requests=load.max_waiting_requests,
            output_tokens_per_second=load.output_tokens_per_second,
            expected_wait_ns=load.expected_wait_ns,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            used_blocks=load.used_blocks,
            step_count=load.step_count,
            preemptions=load.preemptions,
            prefix_query_tokens=load.prefix_query_tokens,
            prefix_hit_tokens=load.prefix_hit_tokens,
            late_work=load.late_work,
            held_plans=load.held_plans,
            late_plans=load.late_plans,
            max_running_sequences=load.max_running_sequences,
            active_requests=load.active_requests,
            taken_requests=load.taken_requests,
            refused_requests=load.refused_requests,
        )
    )


def write_page(query_id: int, page: RequestPage) -> engine_pb2.FromEngine:
    """The answer to a ListQuery."""
    rows = [
        engine_pb2.RequestRow(
            request_id=row.request_id,
            state=row.state.value,
            created_at_ns=row.created_at_ns,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            finish_reasons=[_END_REASONS[reason] for reason in row.finish_reasons],
            detached=row.detached,
            sequence_number=row.sequence_number,
        )
        for row in page.rows
    ]
    return engine_pb2.FromEngine(
        list=engine_pb2.RequestList(query_id=query_id, rows=rows, next_before=page.next_before)
    )
