"""Facts of simulated servers become spans that are complete, ordered and linked both ways.

They lie inside their parents, and say what the ledger says.
"""

from __future__ import annotations

import collections
import dataclasses

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.telemetry.reported import Listener, attributes, heard
from tests.telemetry.story import BACKEND, ENGINE, SERVICE, UNIX_OFFSET_NS, Story, tell

from headrace_facts import facts, token_steps
from headrace_telemetry.spans import step_ids

_PHASES = {"queue": "queued", "prefill": "prefill", "decode": "decode", "preempted": "preempted"}
seeds = st.integers(0, 2**32)


def _by_id(spans: list[trace_pb2.Span]) -> dict[bytes, trace_pb2.Span]:
    ids = {span.span_id: span for span in spans}
    assert len(ids) == len(spans), "two spans with one id"
    return ids


@hypothesis.given(seed=seeds, num_requests=st.integers(1, 5), sampled=st.sampled_from((0.5, 1.0)), read=st.booleans())
@hypothesis.settings(max_examples=40)
def test_every_token_has_a_span(seed: int, num_requests: int, sampled: float, read: bool) -> None:
    story = tell(seed, num_requests, sampled=sampled, read=read)
    counted = collections.Counter(span.trace_id.hex() for span in heard(story).named("token"))
    expected = {
        each.span.trace_id: story.generations[each.number].output_tokens
        for each in story.requests
        if each.sampled and each.span
    }
    assert counted == expected


@hypothesis.given(seed=seeds, num_requests=st.integers(1, 4), read=st.booleans())
@hypothesis.settings(max_examples=40)
def test_times_are_ordered_and_inside_their_parents(seed: int, num_requests: int, read: bool) -> None:
    spans = heard(tell(seed, num_requests, read=read)).spans
    ids = _by_id(spans)
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano, span
        parent = ids.get(span.parent_span_id)
        if parent is None:
            assert span.name in ("engine.step", "headrace.v1.InferenceService/Generate")
            continue
        assert parent.trace_id == span.trace_id
        assert parent.start_time_unix_nano <= span.start_time_unix_nano, (parent.name, span.name)
        assert span.end_time_unix_nano <= parent.end_time_unix_nano, (parent.name, span.name)
    for tokens in _outputs(spans).values():
        starts = [span.start_time_unix_nano for span in tokens]
        assert [attributes(span)["headrace.token.index"] for span in tokens] == list(range(len(tokens)))
        assert starts == sorted(starts)


def _outputs(spans: list[trace_pb2.Span]) -> dict[tuple[bytes, int], list[trace_pb2.Span]]:
    outputs = collections.defaultdict(list)
    for span in spans:
        if span.name == "token":
            outputs[span.trace_id, attributes(span)["headrace.output.index"]].append(span)
    return outputs


@hypothesis.given(seed=seeds, num_requests=st.integers(1, 4), sampled=st.sampled_from((0.5, 1.0)))
@hypothesis.settings(max_examples=40)
def test_links_resolve_both_ways(seed: int, num_requests: int, sampled: float) -> None:
    spans = heard(tell(seed, num_requests, sampled=sampled)).spans
    ids = _by_id(spans)
    by_request = collections.defaultdict(set)
    for span in spans:
        for link in span.links:
            assert ids[link.span_id].trace_id == link.trace_id
        if span.name in ("token", "prefill.chunk"):
            by_request[span.trace_id].add(span.links[0].span_id)
    for step in spans:
        if step.name == "engine.step":
            linked = {link.trace_id for link in step.links}
            assert linked
            assert {trace for trace, steps in by_request.items() if step.span_id in steps} <= linked


@hypothesis.given(seed=seeds, num_requests=st.integers(1, 4))
@hypothesis.settings(max_examples=40)
def test_phases_are_the_parts_of_the_ledger(seed: int, num_requests: int) -> None:
    story = tell(seed, num_requests)
    spans = heard(story).spans
    for each in story.requests:
        assert each.span is not None
        sums = dict.fromkeys(_PHASES.values(), 0)
        for span in spans:
            if span.trace_id.hex() == each.span.trace_id and span.name in _PHASES:
                sums[_PHASES[span.name]] += span.end_time_unix_nano - span.start_time_unix_nano
        ledger = story.generations[each.number].ledger
        assert sums == {name: ledger[name] for name in sums}


@hypothesis.given(seed=seeds, num_requests=st.integers(1, 4), read=st.booleans())
@hypothesis.settings(max_examples=30)
def test_arrays_say_what_spans_say(seed: int, num_requests: int, read: bool) -> None:
    story = tell(seed, num_requests, read=read)
    tokens = _outputs(heard(story).spans)
    as_arrays = Story(
        **{
            **dataclasses.asdict(story),
            "reported": [(who, _with(fact, facts.Detail.ARRAY)) for who, fact in story.reported],
        }
    )
    for span in heard(as_arrays).named("text_completion demo"):
        arrays = {
            name.removeprefix("headrace.token."): values
            for name, values in attributes(span).items()
            if name.startswith("headrace.token.")
        }
        rows = [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]
        spans = [each for (trace, _), output in sorted(tokens.items()) if trace == span.trace_id for each in output]
        assert len(rows) == len(spans)
        for row, token in zip(rows, spans, strict=True):
            said = attributes(token)
            assert (row["output_index"], row["index"], row["step_id"]) == (
                said["headrace.output.index"],
                said["headrace.token.index"],
                said["headrace.step.id"],
            )
            assert row["scheduled_ns"] == token.start_time_unix_nano - span.start_time_unix_nano
            assert row["sampled_ns"] == said["headrace.token.sampled_ns"]
            assert row["emitted_ns"] == said.get("headrace.token.emitted_ns", -1)
            if read:
                assert row["written_ns"] == token.end_time_unix_nano - span.start_time_unix_nano


def _with(fact: facts.Fact, detail: facts.Detail) -> facts.Fact:
    return msgspec.structs.replace(fact, detail=detail) if isinstance(fact, facts.Generation) else fact


def test_a_step_says_who_was_in_it_and_what_it_cost() -> None:
    story = tell(5, 4)
    steps = {attributes(span)["headrace.step.id"]: attributes(span) for span in heard(story).named("engine.step")}
    assert set(steps) == set(story.records["step_id"].tolist())
    for record, members in zip(story.records, story.members, strict=True):
        said = steps[int(record["step_id"])]
        assert said["headrace.step.request_ids"] == [f"req_{number:04d}" for number in dict.fromkeys(members)]
        assert sum(said.get("headrace.step.prefill_request_tokens", [])) == record["num_prefill_tokens"]
        assert said["headrace.step.planned_ns"] == int(record["planned_at_ns"]) + UNIX_OFFSET_NS
        assert said["headrace.step.graph"] is True
        assert said["headrace.step.bound"] in ("memory", "compute")
        share = max(said["headrace.step.flops_share"], said["headrace.step.bandwidth_share"])
        assert share > 0


def test_ids_of_steps_are_derived_and_256_share_a_trace() -> None:
    spans = heard(tell(6, 2)).named("engine.step")
    for span in spans:
        step_id = attributes(span)["headrace.step.id"]
        assert span.span_id == step_ids.span_id(ENGINE, step_id)
        assert span.trace_id == step_ids.trace_id(ENGINE, step_id)
    traces = {step_ids.trace_id(ENGINE, step_id) for step_id in range(1, 513)}
    assert len(traces) == 2
    assert step_ids.trace_id(ENGINE, 256) == step_ids.trace_id(ENGINE, 1) != step_ids.trace_id(ENGINE, 257)


def test_the_inference_span_follows_the_conventions() -> None:
    story = tell(7, 1)
    span = heard(story).named("text_completion demo")[0]
    said, generation = attributes(span), story.generations[0]
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.provider.name"] == "headrace"
    assert said["gen_ai.request.max_tokens"] == story.requests[0].max_tokens
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.response.time_to_first_chunk"] == pytest.approx(generation.first_chunk_ns / 1e9)
    assert said["headrace.engine.time_to_first_token"] == pytest.approx(generation.ttft_ns / 1e9)
    assert said["gen_ai.usage.output_tokens"] == generation.output_tokens
    assert said["headrace.trace.kept"] == "head"
    assert said["headrace.engine"] == ENGINE
    assert said["headrace.ledger.decode_ns"] == generation.ledger["decode"]
    assert "headrace.trace.incomplete" not in said


@pytest.mark.parametrize(
    ("status", "failed"), [("OK", False), ("INVALID_ARGUMENT", False), ("CANCELLED", False), ("INTERNAL", True)]
)
def test_only_faults_of_the_server_are_errors_of_a_call(status: str, failed: bool) -> None:
    context = facts.SpanContext("a" * 32, "b" * 16, "c" * 16, "vendor=1", True)
    call = facts.CallEnded("headrace.v1.InferenceService/Chat", status, UNIX_OFFSET_NS, 5, 9, "r", context)
    span = Listener().hear([(SERVICE, call)]).wait(3).spans[0]
    assert span.kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert span.trace_state == "vendor=1"
    assert (span.status.code == trace_pb2.Status.STATUS_CODE_ERROR) is failed
    assert attributes(span).get("error.type") == (None if status == "OK" else status)


@hypothesis.given(seed=seeds, lost=st.floats(0.1, 1.0))
@hypothesis.settings(max_examples=30)
def test_a_generation_whose_steps_were_lost_is_marked_and_has_all_its_tokens(seed: int, lost: float) -> None:
    story = tell(seed, 2)
    generator = np.random.default_rng(seed)
    left = story.records[generator.random(len(story.records)) >= lost]
    reported = [(who, fact) for who, fact in story.reported if not isinstance(fact, facts.Steps)]
    reported.insert(1, (SERVICE, facts.Steps(ENGINE, UNIX_OFFSET_NS, left.tobytes())))
    listener = Listener().hear(reported)
    listener.sink.finish()
    for span in listener.named("text_completion demo"):
        tokens = [each for each in listener.named("token") if each.trace_id == span.trace_id]
        assert len(tokens) == attributes(span)["gen_ai.usage.output_tokens"]
        for token in tokens:
            assert (
                span.start_time_unix_nano
                <= token.start_time_unix_nano
                <= token.end_time_unix_nano
                <= span.end_time_unix_nano
            )
        lacking = [each for each in tokens if "headrace.trace.incomplete" in attributes(each)]
        known = set(left["step_id"].tolist())
        assert len(lacking) == sum(attributes(each)["headrace.step.id"] not in known for each in tokens)
        if lacking:
            assert attributes(span)["headrace.trace.incomplete"] is True


def test_a_generation_waits_for_steps_that_come_late() -> None:
    story = tell(8, 2)
    steps = [entry for entry in story.reported if isinstance(entry[1], facts.Steps)]
    listener = Listener().hear(entry for entry in story.reported if entry not in steps)
    assert not listener.named("token")
    listener.hear(steps).wait(0)
    assert len(listener.named("token")) == sum(each.output_tokens for each in story.generations.values())
    assert not any("headrace.trace.incomplete" in attributes(span) for span in listener.spans)


def test_a_generation_does_not_wait_for_ever() -> None:
    story = tell(8, 1)
    listener = Listener().hear(entry for entry in story.reported if not isinstance(entry[1], facts.Steps)).wait(3)
    assert attributes(listener.named("text_completion demo")[0])["headrace.trace.incomplete"] is True


def test_steps_that_two_processes_tell_are_one() -> None:
    story = tell(9, 3)
    steps = [entry for entry in story.reported if isinstance(entry[1], facts.Steps)]
    listener = heard(
        Story(
            **{
                **dataclasses.asdict(story),
                "reported": [*story.reported[:4], *steps, *steps, *story.reported[4:], *steps],
            }
        )
    )
    ids = [attributes(span)["headrace.step.id"] for span in listener.named("engine.step")]
    assert len(ids) == len(set(ids)) == len(story.records)


def test_a_backend_that_is_heard_after_its_services_still_says_who_was_in_a_step() -> None:
    story = tell(6)
    services = [each for each in story.reported if each[0] is not BACKEND]
    backend = [each for each in story.reported if each[0] is BACKEND]
    listener = Listener().hear(services).wait(1.0).hear(backend)
    known = [attributes(span).get("headrace.step.request_ids") for span in listener.named("engine.step")]
    assert len(known) == sum(map(bool, story.members)) and all(known)


def test_steps_of_a_backend_that_is_never_heard_come_without_who_was_in_them() -> None:
    story = tell(6)
    listener = Listener().hear(each for each in story.reported if each[0] is not BACKEND)
    assert not listener.named("engine.step")
    steps = [attributes(span) for span in listener.wait(6.0).named("engine.step")]
    assert len(steps) == sum(map(bool, story.members))
    assert all(step["headrace.trace.incomplete"] and "headrace.step.request_ids" not in step for step in steps)


def test_tokens_of_an_earlier_attempt_have_no_step() -> None:
    story = tell(10, 1, calls=False)
    generation = story.generations[0]
    assert generation.trace is not None
    steps = [
        token_steps.of_runs(
            [(2 + index, step) for index, step in enumerate(token_steps.step_ids(output).tolist())],
            2 + output.num_tokens,
        )
        for output in generation.trace.token_steps
    ]
    changed = msgspec.structs.replace(generation, trace=msgspec.structs.replace(generation.trace, token_steps=steps))
    listener = Listener().hear([*story.reported[:-1], (SERVICE, changed)])
    earlier = [span for span in listener.named("token") if attributes(span)["headrace.token.index"] < 2]
    assert len(earlier) == 2 * story.requests[0].outputs
    assert all(not span.links and "headrace.step.id" not in attributes(span) for span in earlier)


@hypothesis.settings(max_examples=15)
@hypothesis.given(seeds, st.integers(2, 5), st.sampled_from([facts.Detail.SPAN, facts.Detail.ARRAY]))
def test_generations_that_are_encoded_together_say_what_they_say_alone(
    seed: int, number: int, detail: facts.Detail
) -> None:
    story = tell(seed, number, calls=False)
    reported = [
        (source, msgspec.structs.replace(fact, detail=detail) if isinstance(fact, facts.Generation) else fact)
        for source, fact in story.reported
    ]
    together = Listener().hear(reported)
    alone = Listener()
    for entry in reported:
        alone.hear([entry])

    def said(listener: Listener) -> list[trace_pb2.Span]:
        spans = [span for span in listener.spans if span.name != "engine.step"]
        names = {span.span_id: span.name for span in spans}
        for span in spans:
            if span.name not in ("text_completion demo", "chat demo"):
                span.span_id = b""
            span.parent_span_id = names.get(span.parent_span_id, "").encode()
        return sorted(spans, key=lambda span: span.SerializeToString(deterministic=True))

    assert said(together) == said(alone)


def test_many_tokens_come_in_blocks() -> None:
    count = 10_000
    records = tell(1, 1).records[:1]
    trace = facts.EngineTrace(
        ENGINE, 0, UNIX_OFFSET_NS, [], b"", [token_steps.of_runs([(index, 1) for index in range(count)], count)]
    )
    generation = msgspec.structs.replace(
        tell(1, 1).generations[0], trace=trace, detail=facts.Detail.SPAN, output_tokens=count, emissions=[]
    )
    reported = [(SERVICE, facts.Steps(ENGINE, UNIX_OFFSET_NS, records.tobytes())), (SERVICE, generation)]
    listener = Listener().hear(reported)
    assert [attributes(span)["headrace.token.index"] for span in listener.named("token")] == list(range(count))
    assert max(block.num_spans for _, block in listener.blocks) == 4096


def test_long_arrays_are_cut_and_say_so() -> None:
    count = 1000
    records = tell(1, 1).records[:1]
    trace = facts.EngineTrace(
        ENGINE, 0, UNIX_OFFSET_NS, [], b"", [token_steps.of_runs([(index, 1) for index in range(count)], count)]
    )
    generation = msgspec.structs.replace(
        tell(1, 1).generations[0], trace=trace, detail=facts.Detail.ARRAY, output_tokens=count, emissions=[]
    )
    reported = [(SERVICE, facts.Steps(ENGINE, UNIX_OFFSET_NS, records.tobytes())), (SERVICE, generation)]
    said = attributes(Listener(trace_max_array_tokens=256).hear(reported).named("text_completion demo")[0])
    assert len(said["headrace.token.step_id"]) == 256
    assert said["headrace.trace.truncated_tokens"] == count - 256


@pytest.mark.parametrize(
    "broken",
    [
        facts.Steps(ENGINE, 0, b"x" * 103),
        facts.Steps(ENGINE, 0, b"\0" * 104, member_counts=b"\1\0\0\0", members=b""),
        facts.RequestBegan(ENGINE, 1, "r", facts.SpanContext("xyz", "b" * 16)),
        facts.CallEnded("m", "OK", 0, 1, 2, "", facts.SpanContext("A" * 32, "b" * 16)),
    ],
)
def test_facts_that_make_no_sense_are_refused(broken: facts.Fact) -> None:
    with pytest.raises(ValueError):
        Listener().sink.take(BACKEND, broken)
