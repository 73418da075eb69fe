"""What steps and recorded requests leave for telemetry.

Nothing is missing, nothing is there twice, and nothing that a lost worker took away is there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.engine.harness import Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.engine import step_log
from headrace_backend.engine.request import AbortCause, EngineRequest, Recording
from headrace_backend.engine.step_log import StepLog
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_facts import facts, step_records, token_steps
from headrace_facts.step_records import StepFlag

ENGINE = "00112233aabbccdd"
OFFSET_NS = 123_456
SPAN = facts.SpanContext("ab" * 16, "cd" * 8, sampled=True)
RECORDED: dict[str, Any] = {"span": SPAN, "recording": Recording()}


class Traced(Harness):
    """An engine whose steps are reported; results say how they were launched."""

    def __init__(self, num_blocks: int = 64, **changes: Any) -> None:
        super().__init__(num_blocks, **changes)
        log = self.engine.steps
        log.engine, log.unix_offset_ns, log.tells = ENGINE, OFFSET_NS, True
        self.reader = log.reader()
        self.num_computed = 0
        # By request id, per output: the step in whose settling each token came into the log.
        self.seen: dict[str, list[list[int]]] = {}

    def settle(self) -> None:
        before = self.worker.num_tokens
        active = [(request.spec.request_id, request.logs) for request in self.engine.active_requests()]
        lengths = [[len(log.tokens) for log in logs] for _, logs in active]
        super().settle()
        self.num_computed += self.worker.num_tokens - before
        step_id = self.engine.load().step_count
        for (request_id, logs), before_it in zip(active, lengths, strict=True):
            outputs = self.seen.setdefault(request_id, [[] for _ in logs])
            for steps, log, length in zip(outputs, logs, before_it, strict=True):
                steps.extend([step_id] * (len(log.tokens) - length))


class Reported:
    """`facts.Steps`, step by step."""

    def __init__(self, steps: facts.Steps | None) -> None:
        assert steps is not None
        assert (steps.engine, steps.unix_offset_ns) == (ENGINE, OFFSET_NS)
        self.records = step_records.decode(steps.records)
        self.members = self._split(steps.member_counts, steps.members, 1)
        self.chunks = self._split(steps.chunk_counts, steps.chunks, 3)
        self.preempted = self._split(steps.preempted_counts, steps.preempted, 1)
        assert len(self.records) == len(self.members) == len(self.chunks) == len(self.preempted)

    @staticmethod
    def _split(counts: bytes, flat: bytes, width: int) -> list[list[Any]]:
        ends = np.cumsum(np.frombuffer(counts, "<u4"))
        rows = np.frombuffer(flat, "<u4").reshape(-1, width)
        assert len(rows) == (ends[-1] if ends.size else 0)
        parts = np.split(rows, ends[:-1])
        return [part.ravel().tolist() if width == 1 else list(map(tuple, part.tolist())) for part in parts]


def trace_of(reader: Reader) -> facts.EngineTrace:
    assert reader.done is not None and reader.done.engine_trace
    return facts.decode_trace(reader.done.engine_trace)


def columns(data: bytes, width: int = 1) -> list[Any]:
    values = np.frombuffer(data, "<u8")
    return values.tolist() if width == 1 else list(map(tuple, values.reshape(-1, width).tolist()))


def check_trace(spec: EngineRequest, reader: Reader, reported: Reported, seen: list[list[int]]) -> None:
    trace, done = trace_of(reader), reader.done
    assert done is not None and (trace.engine, trace.unix_offset_ns) == (ENGINE, OFFSET_NS)
    ids = reported.records["step_id"].tolist()
    taking_part = {step for step, members in zip(ids, reported.members, strict=True) if trace.number in members}
    assert len(trace.token_steps) == spec.asked.n
    for output_index, data in enumerate(trace.token_steps):
        steps = token_steps.step_ids(data).tolist()
        num_emitted = len(spec.emitted[output_index]) if spec.emitted else 0
        assert steps[:num_emitted] == [0] * num_emitted
        own = steps[num_emitted:]
        assert len(own) == len(reader.tokens.get(output_index, []))
        assert own == seen[output_index]
        assert own == sorted(set(own)), "a step samples one token of an output, in order"
        assert taking_part.issuperset(own)
    check_chunks(spec, reader, trace, reported)
    check_phases(spec, reader, trace)


def check_chunks(spec: EngineRequest, reader: Reader, trace: facts.EngineTrace, reported: Reported) -> None:
    chunks = columns(trace.chunks, 3)
    of_steps = [
        (int(record["step_id"]), first, count)
        for record, entries in zip(reported.records, reported.chunks, strict=True)
        for number, first, count in entries
        if number == trace.number
    ]
    # What was computed of an output that had ended by then is the step's, not the request's.
    assert not Counter(chunks) - Counter(of_steps)
    assert [chunk[0] for chunk in chunks] == sorted(chunk[0] for chunk in chunks)
    if not any(reader.tokens.values()):
        return
    assert reader.started is not None
    first_step = min(
        token_steps.step_ids(data)[len(spec.emitted[i]) if spec.emitted else 0]
        for i, data in enumerate(trace.token_steps)
        if reader.tokens.get(i)
    )
    before = [(first, count) for step, first, count in chunks if step <= first_step]
    assert before, "the last token of a prompt is always computed"
    if spec.asked.n == 1 and not reader.resumed and reader.done is not None and not reader.done.preemptions:
        end = before[0][0]
        # What the cache gave of emitted tokens is not of the prompt.
        assert min(end, len(spec.prompt_ids)) == reader.started.cached_tokens
        for first, count in before:
            assert first == end, "the prompt has no gap"
            end += count
        num_known = len(spec.prompt_ids) + (len(spec.emitted[0]) if spec.emitted else 0)
        assert end == num_known


def check_phases(spec: EngineRequest, reader: Reader, trace: facts.EngineTrace) -> None:
    done = reader.done
    assert done is not None
    sums: Counter[str] = Counter()
    end_ns = None
    for phase in trace.phases:
        assert phase.begin_ns < phase.end_ns
        assert end_ns in (None, phase.begin_ns), "there is no gap"
        end_ns = phase.end_ns
        sums[phase.phase] += phase.end_ns - phase.begin_ns
    assert end_ns in (None, done.ended_at_ns)
    sums["queued"] += spec.service_ns
    assert sums == Counter(
        queued=done.queued_ns,
        prefill=done.prefill_ns,
        decode=done.decode_ns,
        preempted=done.preempted_ns,
        restarting=done.engine_restart_ns,
    )


requests = st.builds(
    lambda shared, own, max_tokens, n, recorded, strings, stop_tokens, emitted, service_ns: request(
        [5] * shared + own,
        max_tokens + emitted,
        n=n,
        strings=tuple(strings),
        token_ids=stop_tokens,
        service_ns=service_ns,
        emitted=tuple(np.arange(emitted, dtype=np.int32) + 1 for _ in range(n)) if emitted else (),
        **(RECORDED if recorded else {}),
    ),
    shared=st.integers(0, 40),
    own=st.lists(st.integers(1, 3), min_size=1, max_size=30),
    max_tokens=st.integers(1, 24),
    n=st.integers(1, 3),
    recorded=st.sampled_from([True, True, False]),
    strings=st.lists(st.sampled_from([b"a", b"abab", b"bcc"]), max_size=2, unique=True),
    stop_tokens=st.frozensets(st.integers(0, 23), max_size=1),
    emitted=st.sampled_from([0, 0, 3]),
    service_ns=st.integers(0, 500),
)


@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    arrivals=st.lists(st.tuples(requests, st.integers(0, 6)), min_size=1, max_size=8),
    deaths=st.frozensets(st.integers(1, 20), max_size=2),
    num_blocks=st.integers(7, 14),
    rows=st.integers(3, 6),
    budget=st.sampled_from([16, 17, 40, 200]),
)
def test_every_token_has_its_step_every_prompt_its_chunks_and_every_moment_its_phase(
    arrivals: list[tuple[EngineRequest, int]], deaths: frozenset[int], num_blocks: int, rows: int, budget: int
) -> None:
    harness = Traced(
        num_blocks, model_len=112, max_num_seqs=rows, max_num_batched_tokens=budget, max_waiting_requests=100
    )
    served = harness.serve(arrivals, deaths)
    steps = harness.engine.steps.take_steps()
    reported = Reported(steps)
    assert steps is not None and harness.reader.take() == steps.records
    check_steps(harness, reported)
    for spec, reader in served:
        assert reader.done is not None
        if spec.recorded:
            check_trace(spec, reader, reported, harness.seen.get(spec.request_id, [[]] * spec.asked.n))
        else:
            assert reader.done.engine_trace == b""
    assert not harness.engine.steps.take_ended()
    assert harness.engine.steps.take_steps() is None


def check_steps(harness: Traced, reported: Reported) -> None:
    records, load = reported.records, harness.engine.load()
    assert records["step_id"].tolist() == list(range(1, load.step_count + 1)), "settled steps only, without a gap"
    assert (records["settled_at_ns"] >= records["planned_at_ns"]).all()
    assert int((records["num_prefill_tokens"] + records["num_decodes"]).sum()) == harness.num_computed
    assert (records["num_blocks"] == harness.num_blocks).all()
    assert (records["free_blocks"] <= harness.num_blocks).all()
    # Of steps that were lost, preemptions are nobody's.
    assert int(records["preemptions"].sum()) <= load.preemptions
    for record, members, chunks, preempted in zip(
        records, reported.members, reported.chunks, reported.preempted, strict=True
    ):
        assert len(members) == record["num_sequences"]
        assert sum(count for _, _, count in chunks) == record["num_prefill_tokens"]
        assert {number for number, _, _ in chunks} <= set(members)
        assert len(preempted) == record["preemptions"]


def test_preempted_requests_are_named_by_the_step_that_took_their_row() -> None:
    harness = Traced(num_blocks=6, max_num_seqs=4)
    served = harness.serve([(request(30, 30, **RECORDED), 0), (request(31, 30, **RECORDED), 0)])
    reported = Reported(harness.engine.steps.take_steps())
    numbers = [number for preempted in reported.preempted for number in preempted]
    assert numbers and int(reported.records["preemptions"].sum()) == harness.engine.load().preemptions == len(numbers)
    for spec, reader in served:
        check_trace(spec, reader, reported, harness.seen[spec.request_id])
        assert reader.done is not None
        number = trace_of(reader).number
        assert numbers.count(number) == reader.done.preemptions
        stays = [phase.phase for phase in trace_of(reader).phases]
        assert stays.count("preempted") == (1 if number in numbers else 0)


def test_an_output_that_found_no_room_for_some_steps_goes_on_where_it_was() -> None:
    harness = Traced(num_blocks=7, enable_prefix_cache=False)
    served = harness.serve([(request(40, 16, **RECORDED), 0), (request(41, 30, **RECORDED), 0)])
    reported = Reported(harness.engine.steps.take_steps())
    assert harness.engine.load().preemptions == 0
    for spec, reader in served:
        check_trace(spec, reader, reported, harness.seen[spec.request_id])
    waits = np.diff(token_steps.step_ids(trace_of(served[1][1]).token_steps[0]).tolist())
    assert sorted(set(waits.tolist()))[0] == 1 < waits.max(), "it waited once"


def test_a_detached_request_is_reported_by_the_engine_and_not_to_its_readers() -> None:
    harness = Traced()
    reader = harness.add(request(10, 4, detached=True, **RECORDED))
    unrecorded = harness.add(request(10, 4, detached=True))
    harness.run()
    first, second = harness.engine.steps.take_ended()
    assert reader.done is not None and unrecorded.done is not None
    assert reader.done.engine_trace == unrecorded.done.engine_trace == b""
    assert first.trace is not None and [steps.num_tokens for steps in first.trace.token_steps] == [4]
    assert second.trace is None
    assert first.request.done == reader.done


def test_a_request_that_was_given_up_is_reported_by_the_engine_and_one_whose_stream_broke_by_nobody() -> None:
    harness = Traced()
    harness.add(request(10, 50, request_id="given-up", **RECORDED))
    (subscriber,) = harness.readers
    harness.add(request(10, 50, request_id="broken", **RECORDED), stream_id=2)
    for _ in range(3):
        harness.step()
    harness.engine.detach(subscriber)
    harness.engine.stream_lost(2)
    (ended,) = harness.engine.steps.take_ended()
    assert ended.request.spec.request_id == "given-up"
    assert ended.trace is not None and ended.trace.token_steps[0].num_tokens == ended.request.num_output_tokens > 0


def test_only_the_reader_that_came_with_the_request_gets_its_trace() -> None:
    harness = Traced()
    owner = harness.add(request(10, 8, request_id="r", **RECORDED))
    harness.step()
    other = harness.subscriber()
    harness.readers[other] = later = Reader()
    harness.engine.attach(other, "r", "", None, 0)
    harness.run()
    assert later.done is not None and later.done.engine_trace == b""
    assert token_steps.step_ids(trace_of(owner).token_steps[0]).tolist() == list(range(1, 9))


def test_what_nobody_traces_or_describes_is_not_recorded() -> None:
    harness = Traced()
    readers = [harness.add(request(10, 4, span=SPAN)), harness.add(request(10, 4, recording=Recording()))]
    harness.run()
    assert [reader.done and reader.done.engine_trace for reader in readers] == [b"", b""]


def test_a_reader_that_lags_gets_the_newest_records(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 200
    monkeypatch.setattr(step_log, "MAX_RECORDS", kept)
    harness = Harness(model_len=8192, num_blocks=520)
    reader = harness.engine.steps.reader()
    harness.add(request(1, kept + 500, token_ids=frozenset()))
    harness.run()
    records = step_records.decode(reader.take())
    last = harness.engine.load().step_count
    assert records["step_id"].tolist() == list(range(last - kept + 1, last + 1))
    assert reader.take() == b""
    harness.add(request(1, 3, token_ids=frozenset()))
    harness.run()
    assert step_records.decode(reader.take())["step_id"].tolist() == [last + 1, last + 2, last + 3]


def test_nothing_is_kept_where_nobody_asks() -> None:
    harness = Harness()
    harness.add(request(10, 8, detached=True, **RECORDED))
    harness.run()
    log = harness.engine.steps
    assert (log.num_records, log.take_steps(), log.take_ended()) == (0, None, [])


@pytest.mark.parametrize("captured", [False, True])
def test_records_tell_how_the_step_ran_and_when_the_device_began_it(captured: bool) -> None:
    harness = Traced()
    harness.add(request(10, 4))
    late_work = iter([0, 2, 2, 2])
    started = [100, 150, 400, 500]
    plans: list[StepPlan] = []
    for start in started:
        while (plan := harness.engine.plan()) is not None:
            plans.append(plan)
            harness.worker.push(plan)
        result: StepResult = harness.worker.run()
        result.started_at_ns, result.finished_at_ns = start, start + 200
        result.captured, result.padded_tokens, result.late_work = captured, 16, next(late_work)
        harness.engine.settle(StepResult.decode(result.encode()))
    records = Reported(harness.engine.steps.take_steps()).records
    # Launched while the one before ran, the second began when that was done.
    assert records["started_at_ns"].tolist() == [100, 300, 400, 600]
    assert records["padded_tokens"].tolist() == [16] * 4
    base = StepFlag.CAPTURED if captured else 0
    assert records["flags"].tolist() == [base, base | StepFlag.LATE_WORK, base, base]
    assert records["num_prefill_tokens"].tolist() == [10, 0, 0, 0]
    assert records["context_tokens"].tolist() == [0, 11, 12, 13]


def test_steps_that_are_tried_alone_say_so() -> None:
    harness = Traced()
    for _ in range(3):
        harness.add(request(10, 20))
    harness.step()
    harness.engine.worker_lost(failed_step_id=2)
    harness.worker = harness.new_worker()
    harness.engine.worker_ready(harness.num_blocks)
    harness.run()
    flags = Reported(harness.engine.steps.take_steps()).records["flags"].tolist()
    assert StepFlag.ISOLATED in flags and flags[0] == 0 == flags[-1]


def test_aborted_requests_have_a_trace_up_to_there() -> None:
    harness = Traced()
    reader = harness.add(request(10, 50, request_id="r", **RECORDED))
    waiting = harness.add(request(400, 50, request_id="w", **RECORDED))
    harness.now_ns += 7
    harness.step()
    harness.engine.abort("r", "", AbortCause.CANCELLED)
    harness.engine.abort("w", "", AbortCause.DEADLINE)
    harness.read()
    assert len(token_steps.step_ids(trace_of(reader).token_steps[0]).tolist()) == 1
    assert token_steps.step_ids(trace_of(waiting).token_steps[0]).tolist() == []
    assert [stay.phase for stay in trace_of(waiting).phases] == ["queued", "prefill"]


def test_a_log_names_its_engine() -> None:
    log = StepLog(ENGINE, OFFSET_NS)
    assert (log.engine, log.unix_offset_ns) == (ENGINE, OFFSET_NS)
