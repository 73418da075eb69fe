"""A simulated server: an engine that steps through requests, and the facts its processes report.

What it knows of itself is what spans are checked against.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from headrace_facts import facts, step_records, token_steps

MS = 1_000_000
UNIX_OFFSET_NS = 1_700_000_000 * 1_000_000_000
ENGINE = "00112233aabbccdd"
SERVICE = facts.Hello("service", "service-0", "service-life", "0.1", 11, UNIX_OFFSET_NS)
BACKEND = facts.Hello("backend", "backend-demo", ENGINE, "0.1", 12, UNIX_OFFSET_NS)
ENGINE_FACTS = facts.EngineFacts(ENGINE, "demo", "cpu", 10**9, 2e9, 1e5, 1e6, 10**5, 1e10, 1e11)


@dataclasses.dataclass
class Asked:
    """A request of the story."""

    number: int
    arrival_ns: int
    prompt: int
    max_tokens: int
    outputs: int
    sampled: bool
    traced: bool
    computed: int = 0
    phases: list[facts.PhaseSpan] = dataclasses.field(default_factory=list)
    phase: str = "queued"
    since_ns: int = 0
    chunks: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    token_steps: list[list[int]] = dataclasses.field(default_factory=list)
    settled: list[list[int]] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    end_ns: int = 0

    @property
    def request_id(self) -> str:
        return f"req_{self.number:04d}"

    @property
    def span(self) -> facts.SpanContext | None:
        if not self.traced:
            return None
        return facts.SpanContext(
            f"{self.number + 1:032x}", f"{self.number + 1:016x}", f"{self.number + 7001:016x}", "", self.sampled
        )

    def turn(self, phase: str, now_ns: int) -> None:
        """Another phase begins."""
        if now_ns > self.since_ns:
            self.phases.append(facts.PhaseSpan(self.phase, self.since_ns, now_ns))
        self.phase, self.since_ns = phase, now_ns

    @property
    def done(self) -> bool:
        return bool(self.token_steps) and all(len(steps) >= self.max_tokens for steps in self.token_steps)


@dataclasses.dataclass
class Story:
    """What was reported, in order of telling, and what is true of it."""

    reported: list[tuple[facts.Hello, facts.Fact]]
    requests: list[Asked]
    generations: dict[int, facts.Generation]
    records: np.ndarray
    members: list[list[int]]


def tell(
    seed: int,
    num_requests: int = 3,
    *,
    detail: facts.Detail = facts.Detail.SPAN,
    sampled: float = 1.0,
    read: bool = True,
    recorded: bool = True,
    max_tokens: int = 12,
    max_prompt: int = 40,
    calls: bool = True,
) -> Story:
    """Plays a story.

    Args:
        seed: of all its choices.
        num_requests: how many are asked.
        detail: of generations.
        sampled: share of them whose context is sampled at the head.
        read: whether somebody reads (emissions).
        recorded: whether those that are not sampled have contexts and are recorded.
        max_tokens: at most, per output.
        max_prompt: at most.
        calls: whether the ends of calls are reported.
    """
    chance = random.Random(seed)
    requests = [_ask(chance, number, sampled, recorded, max_tokens, max_prompt) for number in range(num_requests)]
    records, columns = _play(chance, requests)
    reported: list[tuple[facts.Hello, facts.Fact]] = [(BACKEND, ENGINE_FACTS)]
    reported += [(BACKEND, facts.RequestBegan(ENGINE, each.number, each.request_id, each.span)) for each in requests]
    reported.append((SERVICE, facts.Steps(ENGINE, UNIX_OFFSET_NS, records.tobytes())))
    reported.append((BACKEND, facts.Steps(ENGINE, UNIX_OFFSET_NS, records.tobytes(), *_flat(columns))))
    generations = {each.number: _generation(chance, each, detail, read) for each in requests}
    for each in requests:
        generation = generations[each.number]
        reported.append((SERVICE, generation))
        if calls:
            parent = each.span and facts.SpanContext(each.span.trace_id, each.span.parent_span_id, "", "", each.sampled)
            reported.append(
                (
                    SERVICE,
                    facts.CallEnded(
                        "headrace.v1.InferenceService/Generate",
                        "OK",
                        UNIX_OFFSET_NS,
                        each.arrival_ns,
                        generation.end_ns,
                        each.request_id,
                        parent,
                    ),
                )
            )
    return Story(reported, requests, generations, records, [members for members, _, _ in columns])


def _ask(chance: random.Random, number: int, sampled: float, recorded: bool, max_tokens: int, max_prompt: int) -> Asked:
    head = chance.random() < sampled
    asked = Asked(
        number,
        10**12 + chance.randrange(20) * MS,
        chance.randint(1, max_prompt),
        chance.randint(1, max_tokens),
        chance.choice((1, 1, 2)),
        head,
        head or recorded,
    )
    asked.since_ns = asked.arrival_ns + chance.randrange(200_000)
    return asked


_Columns = list[tuple[list[int], list[tuple[int, int, int]], list[int]]]


def _play(chance: random.Random, requests: list[Asked]) -> tuple[np.ndarray, _Columns]:
    """The engine's steps until all are done."""
    rows, columns = [], []
    now_ns = max(each.arrival_ns for each in requests) + MS
    while not all(each.done for each in requests):
        step_id = len(rows) + 1
        planned, started = now_ns, now_ns + chance.randrange(1, 300_000)
        finished = started + chance.randrange(1, 20 * MS)
        settled = finished + chance.randrange(1, 200_000)
        live = [each for each in requests if not each.done]
        preempted = [each for each in live if each.phase == "decode" and chance.random() < 0.05]
        for each in preempted:
            each.turn("preempted", planned)
            each.preemptions += 1
            each.computed = 0
        row = _step(chance, [each for each in live if each not in preempted], step_id, planned, settled)
        numbers, chunks, prefill, decodes, samples = row
        rows.append(
            (step_id, planned, started, finished, settled, 100 * decodes, prefill * prefill, len(numbers), prefill)
            + (decodes, samples, 50, 100, 0, len(preempted), 0, 0, 1, 0, 0, 0)
        )
        columns.append((numbers, chunks, [each.number for each in preempted]))
        now_ns = settled + chance.randrange(1, 100_000)
    return np.array(rows, step_records.RECORD), columns


def _step(
    chance: random.Random, live: list[Asked], step_id: int, planned: int, settled: int
) -> tuple[list[int], list[tuple[int, int, int]], int, int, int]:
    numbers, chunks, prefill, decodes, samples = [], [], 0, 0, 0
    for each in live:
        numbers += [each.number] * (each.outputs if each.computed == each.prompt else 1)
        if each.computed < each.prompt:
            if each.phase != "prefill":
                each.turn("prefill", planned)
            tokens = min(chance.randint(1, 16), each.prompt - each.computed)
            chunks.append((each.number, each.computed, tokens))
            each.chunks.append((step_id, each.computed, tokens))
            each.computed += tokens
            prefill += tokens
            if each.computed < each.prompt:
                continue
            each.turn("decode", settled)
            each.token_steps = each.token_steps or [[] for _ in range(each.outputs)]
            each.settled = each.settled or [[] for _ in range(each.outputs)]
        else:
            decodes += each.outputs
        for steps, times in zip(each.token_steps, each.settled, strict=True):
            count = min(chance.choice((1, 1, 1, 3)), each.max_tokens - len(steps))
            steps += [step_id] * count
            times += [settled] * count
            samples += count
        if each.done:
            each.turn("", settled)
            each.end_ns = settled
    return numbers, chunks, prefill, decodes, samples


def _flat(columns: _Columns) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
    parts: list[bytes] = []
    for index in range(3):
        parts.append(np.array([len(row[index]) for row in columns], "<u4").tobytes())
        parts.append(np.array([entry for row in columns for entry in row[index]], "<u4").tobytes())
    return parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]


def _generation(chance: random.Random, each: Asked, detail: facts.Detail, read: bool) -> facts.Generation:
    emissions, first_written, last = [], [], each.end_ns
    # Readers that keep up get a token a message, taken at once.
    keeps_up = chance.random() < 0.3
    for settled in each.settled:
        counts, made, written = [], [], []
        begin = 0
        while begin < len(settled):
            size = 1 if keeps_up else min(chance.randint(1, 3), len(settled) - begin)
            at = max([settled[begin + size - 1] + chance.randrange(50_000), *made])
            counts.append(size)
            made.append(at)
            written.append(at if keeps_up else at + chance.randrange(80_000))
            begin += size
        emission = facts.Emission(
            *(np.array(column, kind).tobytes() for column, kind in ((counts, "<u4"), (made, "<u8"), (written, "<u8")))
        )
        if keeps_up and chance.random() < 0.8:
            emission = facts.Emission(b"", emission.made_at_ns, b"")
        emissions.append(emission)
        last = max([last, *written])
        first_written.append(written[0])
    end_ns = last + chance.randrange(100_000) if read else each.end_ns
    trace = facts.EngineTrace(
        ENGINE,
        each.number,
        UNIX_OFFSET_NS + chance.choice((-1, 1)) * chance.randrange(1000),
        each.phases,
        np.array(each.chunks, "<u8").tobytes(),
        [token_steps.of_runs(enumerate(steps), len(steps)) for steps in each.token_steps],
    )
    return facts.Generation(
        request_id=each.request_id,
        model="demo",
        model_revision="r1",
        operation="text_completion",
        wire="generate",
        unix_offset_ns=UNIX_OFFSET_NS,
        arrival_ns=each.arrival_ns,
        end_ns=end_ns,
        ttft_ns=min(times[0] for times in each.settled) - each.arrival_ns,
        prompt_tokens=each.prompt,
        output_tokens=sum(map(len, each.token_steps)),
        cached_tokens=0,
        finish_reasons=["length"] * each.outputs,
        ledger=_ledger(each, end_ns),
        preemptions=each.preemptions,
        parameters={"max_tokens": each.max_tokens, "temperature": 0.5},
        span=each.span,
        detail=detail,
        trace=trace if each.traced else None,
        emissions=emissions if read and each.traced else [],
        first_chunk_ns=min(first_written) - each.arrival_ns if read else 0,
    )


def _ledger(each: Asked, end_ns: int) -> dict[str, int]:
    names = {"queued": "queued", "prefill": "prefill", "decode": "decode", "preempted": "preempted"}
    parts = dict.fromkeys(names.values(), 0)
    for stay in each.phases:
        parts[stay.phase] += stay.end_ns - stay.begin_ns
    # Less than it was: the way to the engine is in no part.
    parts["queued"] += (each.phases[0].begin_ns - each.arrival_ns) // 2
    parts["end_to_end"] = end_ns - each.arrival_ns
    return parts
