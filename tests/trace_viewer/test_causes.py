"""Every wait has the cause that was planted, and its parts leave nothing out."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.trace_viewer.synthetic_traces import Plan, Request, World, beside_a_long_prefill

from headrace_trace.causes import explain
from headrace_trace.explanation import Explanation, Gap, Kind
from headrace_trace.reading import read_trace
from headrace_trace.spans import parse
from headrace_trace.windows import Where, parts_between
from headrace_trace.words import cause_words, lines_of

LONG = "01JLONGPROMPT-7qm2"
ONE = "01JDECODE0005-7qm2"
# What clocks of the simulation add around what was planted: reading and sending.
TOLERANCE_MS = 0.5


def explained(plan: Plan, request_id: str = ONE, detail: str = "array") -> Explanation:
    return explain(read_trace(parse(World(plan).traces(detail).SerializeToString()), request_id=request_id))


def gap_of(explanation: Explanation, index: int) -> Gap:
    return next(gap for gap in explanation.gaps if gap.index == index)


@pytest.mark.parametrize("detail", ["array", "span"])
def test_a_long_prefill_is_named_for_each_token_that_it_delayed(detail: str) -> None:
    plan = beside_a_long_prefill()
    world = World(plan)
    spans = parse(world.traces(detail).SerializeToString())
    slow = {step.step_id: dict(step.prefills)[LONG] for step in world.steps if LONG in dict(step.prefills)}
    assert len(slow) == 5
    for number in range(32):
        explanation = explain(read_trace(spans, request_id=f"01JDECODE{number:04}-7qm2"))
        delayed = [gap for gap in explanation.gaps if gap.step_id in slow]
        assert len(delayed) == len(slow)
        for gap in delayed:
            assert gap.step_id is not None
            assert gap.cause.kind is Kind.PREFILL
            assert [(p.request_id, p.tokens) for p in gap.cause.prefills] == [(LONG, slow[gap.step_id])]
            assert gap.cause.excess_ms == pytest.approx(slow[gap.step_id] * plan.prompt_ms, abs=TOLERANCE_MS)
            assert f"prefill of request {LONG} ({slow[gap.step_id]:,} tokens) took the step" in cause_words(
                gap, explanation
            )
        others = [gap for gap in explanation.gaps if gap.step_id not in slow and gap.index > 3]
        assert {gap.cause.kind for gap in others} == {Kind.USUAL}


@pytest.mark.parametrize(
    ("accepted", "words"),
    [
        (30, "drafts  30 of 40 drafted tokens accepted (75%): speculation saved its outputs 30 steps of one token"),
        (0, "drafts  0 of 40 drafted tokens accepted (0%): speculation saved no step"),
    ],
)
def test_what_speculation_saved_is_said_where_something_was_drafted(accepted: int, words: str) -> None:
    spans = parse(World(beside_a_long_prefill()).traces("array", only=[ONE]).SerializeToString())
    plain = explain(read_trace(spans))
    assert not any(line.startswith("drafts") for line in lines_of(plain))
    drafted = {"headrace.draft_tokens": 40, "headrace.accepted_tokens": accepted}
    spans = [dataclasses.replace(span, attributes={**span.attributes, **drafted}) for span in spans]
    assert words in lines_of(explain(read_trace(spans)))


def test_it_is_said_in_the_words_of_the_ten_longest_waits() -> None:
    lines = lines_of(explained(beside_a_long_prefill()))
    assert sum(f"prefill of request {LONG}" in line for line in lines) == 5
    assert lines[0] == f"request {ONE} on llama-3.1-8b"
    assert "ITL p50 7.96 ms" in lines[2] and "a step of decodes only takes 7.96 ms" in lines[2]
    assert sum(line[:4].strip().rstrip(".").isdigit() and line[3] == "." for line in lines) == 10


PLANTED = [
    (Kind.DEVICE, {"slow_steps": {30: 15.0}}, 30, 15.0),
    (Kind.HOST_IDLE, {"idle_before": {30: 12.0}}, 30, 12.0),
    (Kind.HOST_READ, {"late_reads": {30: 9.0}}, 30, 9.0),
    (Kind.ENGINE_RESTART, {"restarts": {30: 500.0}}, 30, 500.0),
]


@pytest.mark.parametrize(("kind", "trouble", "step", "ms"), PLANTED)
@pytest.mark.parametrize("detail", ["array", "span"])
def test_trouble_of_a_step_is_the_cause_of_its_token(
    kind: Kind, trouble: dict[str, object], step: int, ms: float, detail: str
) -> None:
    explanation = explained(dataclasses.replace(beside_a_long_prefill(), **trouble), detail=detail)
    gap = next(gap for gap in explanation.gaps if gap.step_id == step)
    assert gap.cause.kind is kind
    # A restart's tokens are computed again, and the step planned ahead of it does not count as
    # waiting.
    slack = 10.0 if kind is Kind.ENGINE_RESTART else TOLERANCE_MS
    assert gap.cause.excess_ms == pytest.approx(ms, abs=slack)


def test_the_device_is_said_to_be_bound_by_what_bounds_it() -> None:
    explanation = explained(dataclasses.replace(beside_a_long_prefill(), slow_steps={30: 15.0}))
    gap = next(gap for gap in explanation.gaps if gap.step_id == 30)
    assert gap.cause.bound == "memory"
    assert "the device: step 30 was long by itself" in cause_words(gap, explanation)
    assert "memory-bound" in cause_words(gap, explanation)


@pytest.mark.parametrize(("field", "kind"), [("late_service", Kind.SERVICE), ("blocked", Kind.READER)])
def test_trouble_of_a_message_is_the_cause_of_its_token(field: str, kind: Kind) -> None:
    explanation = explained(dataclasses.replace(beside_a_long_prefill(), **{field: {(ONE, 80): 33.0}}))
    gap = gap_of(explanation, 80)
    assert gap.cause.kind is kind
    assert gap.cause.excess_ms == pytest.approx(33.0, abs=TOLERANCE_MS)
    # Those that had to wait behind it came at once: nobody else is blamed.
    assert all(gap_of(explanation, index).cause.kind is Kind.USUAL for index in range(81, 85))


def test_a_preemption_is_the_cause_with_what_had_to_be_computed_again() -> None:
    explanation = explained(dataclasses.replace(beside_a_long_prefill(), preemptions={ONE: (60, 6)}))
    cause = max(explanation.gaps, key=lambda gap: (not gap.first) * (gap.cause.kind is Kind.PREEMPTION) * gap.ms).cause
    assert cause.kind is Kind.PREEMPTION
    assert cause.excess_ms > 6 * 7.0 - 8.0


def test_the_first_token_waits_for_its_own_prompt_or_in_the_queue() -> None:
    own = explained(beside_a_long_prefill(), LONG).gaps[0]
    assert own.first and own.cause.kind is Kind.OWN_PREFILL
    assert own.cause.prefills[0].tokens == 8192
    plan = Plan(tuple(Request(f"r-{n}", n * 0.1, 100, 80) for n in range(3)), rows=2)
    queued = explained(plan, "r-2").gaps[0]
    assert queued.cause.kind is Kind.QUEUE
    assert queued.cause.excess_ms > 500


def test_a_small_prefill_is_no_excuse_for_a_step_that_hung() -> None:
    # Each comes alone while one decodes: 30 tokens of a prompt cost 0.6 ms.
    requests = (Request("r-0", 0, 50, 150), *(Request(f"r-{n}", 100.0 * n, 30, 3) for n in range(1, 8)))
    world = World(Plan(requests))
    step = next(step.step_id for step in world.steps if "r-4" in dict(step.prefills))
    explanation = explained(Plan(requests, slow_steps={step: 40.0}), "r-0")
    gap = next(gap for gap in explanation.gaps if gap.step_id == step)
    assert gap.cause.kind is Kind.DEVICE
    assert gap.cause.excess_ms == pytest.approx(40.6, abs=TOLERANCE_MS)


def test_a_step_that_the_trace_lacks_is_said_to_be_missing() -> None:
    explanation = explained(
        dataclasses.replace(beside_a_long_prefill(), lost_steps=frozenset({30}), slow_steps={30: 20.0})
    )
    gap = next(gap for gap in explanation.gaps if gap.step_id == 30)
    assert gap.cause.kind is Kind.UNKNOWN
    assert "step 30 is not in it" in cause_words(gap, explanation)


def test_without_any_steps_the_waits_are_still_listed() -> None:
    spans = [s for s in parse(World(beside_a_long_prefill()).traces().SerializeToString()) if s.name != "engine.step"]
    explanation = explain(read_trace(spans, request_id=ONE))
    assert len(explanation.gaps) == 120
    assert len(lines_of(explanation)) > 20


def test_without_tokens_it_is_said_why() -> None:
    assert any("trace_detail=off" in line for line in lines_of(explained(beside_a_long_prefill(), detail="off")))


TROUBLE = st.dictionaries(st.integers(1, 60), st.floats(0, 60), max_size=4)


@settings(max_examples=40)
@given(
    slow=TROUBLE,
    idle=TROUBLE,
    late=TROUBLE,
    restarts=st.dictionaries(st.integers(4, 60), st.floats(1, 300), max_size=1),
    preempted=st.dictionaries(
        st.sampled_from(["r-0", "r-1"]), st.tuples(st.integers(3, 40), st.integers(1, 9)), max_size=1
    ),
    blocked=st.dictionaries(
        st.tuples(st.sampled_from(["r-0", "r-1"]), st.integers(0, 30)), st.floats(0, 50), max_size=3
    ),
    lost=st.frozensets(st.integers(1, 60), max_size=8),
    detail=st.sampled_from(["array", "span"]),
    n=st.integers(1, 2),
)
# The restart ends before it begins, as where two processes' clocks disagree.
@example(
    slow={},
    idle={},
    late={},
    restarts={11: 1.0},
    preempted={},
    blocked={},
    lost=frozenset([10]),
    detail="array",
    n=1,
)
def test_parts_follow_one_another_and_add_up_to_the_wait(
    slow: dict[int, float],
    idle: dict[int, float],
    late: dict[int, float],
    restarts: dict[int, float],
    preempted: dict[str, tuple[int, int]],
    blocked: dict[tuple[str, int], float],
    lost: frozenset[int],
    detail: str,
    n: int,
) -> None:
    requests = (Request("r-0", 0, 90, 40, n=n), Request("r-1", 20, 3000, 30), Request("r-2", 90, 500, 9))
    plan = Plan(
        requests,
        slow_steps=slow,
        idle_before=idle,
        late_reads=late,
        restarts=restarts,
        preemptions=preempted,
        blocked=blocked,
        lost_steps=lost,
    )
    spans = parse(World(plan).traces(detail).SerializeToString())
    for request_id in ("r-0", "r-1"):
        trace = read_trace(spans, request_id=request_id)
        explanation = explain(trace)
        assert len(explanation.gaps) == len(trace.tokens)
        for tokens in trace.outputs.values():
            at = trace.start_ns
            for token in tokens:
                parts = parts_between(trace, at, token)
                arrived = token.arrived_ns
                assert arrived is not None
                assert sum(part.ns for part in parts) == max(0, arrived - at)
                for part in parts:
                    assert part.ns > 0 and part.start_ns == at
                    at = part.end_ns
                assert at == max(at, arrived)
        for gap in explanation.gaps:
            assert sum(ms for _, ms in gap.parts_ms) == pytest.approx(gap.ms, abs=1e-6)
            charged = sum(cause.excess_ms for cause in gap.causes)
            assert charged <= gap.ms + 1e-6
            assert gap.causes


def test_waits_of_messages_with_several_tokens_are_of_the_first() -> None:
    trace = read_trace(parse(World(beside_a_long_prefill()).traces().SerializeToString()), request_id=ONE)
    together = dataclasses.replace(
        trace.tokens[11], written_ns=trace.tokens[10].written_ns, emitted_ns=trace.tokens[10].emitted_ns
    )
    merged = dataclasses.replace(trace, tokens=(*trace.tokens[:11], together, *trace.tokens[12:]))
    gap = gap_of(explain(merged), 11)
    assert (gap.ms, gap.parts_ms, gap.cause.kind) == (0.0, (), Kind.USUAL)


def test_outputs_that_waited_for_one_step_are_reported_once() -> None:
    requests = (Request("r-0", 0, 50, 80, n=4), Request("r-1", 200, 2000, 3))
    explanation = explained(Plan(requests), "r-0")
    assert len({gap.step_id for gap in explanation.slowest()}) == 10
    assert "(and of 3 more)" in "\n".join(lines_of(explanation))


def test_the_way_to_the_engine_is_told_apart_from_its_queue() -> None:
    trace = read_trace(parse(World(beside_a_long_prefill()).traces().SerializeToString()), request_id=ONE)
    earlier = dataclasses.replace(trace, start_ns=trace.start_ns - 90_000_000, ttft_ns=None, engine_ttft_ns=None)
    gap = explain(earlier).gaps[0]
    assert gap.cause.kind is Kind.ARRIVAL
    assert gap.cause.excess_ms == pytest.approx(90, abs=TOLERANCE_MS)
    assert gap.parts_ms[0] == (Where.ARRIVAL, pytest.approx(90))


def test_a_step_far_from_both_ceilings_is_said_to_be() -> None:
    explanation = explained(dataclasses.replace(beside_a_long_prefill(), slow_steps={30: 90.0}))
    gap = next(gap for gap in explanation.gaps if gap.step_id == 30)
    assert "memory-bound by its work, but far from both ceilings: 5% of bandwidth" in cause_words(gap, explanation)


def test_where_names_are_stable() -> None:
    # JSON that people keep is read by these.
    assert {str(where) for where in Where} == {
        "arrival",
        "queue",
        "preempted",
        "engine_restart",
        "other_step",
        "idle",
        "step",
        "settle",
        "service",
        "write",
        "unknown",
    }
