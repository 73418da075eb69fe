"""Facts as services and backends would tell them, for tests of what becomes of them in figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from headrace_facts import facts, step_records

MODEL = "demo"
ENGINE = "00112233aabbccdd"
SERVICE = facts.Hello("service", "service-0", "service-life-1", "0.1.0", 11, 0)
BACKEND = facts.Hello("backend", "backend-demo", ENGINE, "0.1.0", 12, 0)
SECOND_NS = 1_000_000_000


def generation(number: int = 1, **changed: Any) -> facts.Generation:
    """A generation of 2 s with 100 prompt tokens, 20 of them cached, and 41 output tokens.

    Its first token comes after 50 ms and leaves after 70.
    """
    reported = facts.Generation(
        request_id=f"request-{number}",
        model=MODEL,
        model_revision="1",
        operation="chat",
        wire="generate",
        unix_offset_ns=0,
        arrival_ns=SECOND_NS,
        end_ns=3 * SECOND_NS,
        ttft_ns=50_000_000,
        prompt_tokens=100,
        output_tokens=41,
        cached_tokens=20,
        finish_reasons=["stop"],
        ledger={"queued": 4_000_000},
        first_chunk_ns=70_000_000,
        span=span(number),
    )
    return msgspec.structs.replace(reported, **changed)


def span(number: int, sampled: bool = True) -> facts.SpanContext:
    """The context of the inference span of a generation."""
    return facts.SpanContext(f"{number:032x}", f"{number:016x}", sampled=sampled)


def call(number: int = 1, **changed: Any) -> facts.CallEnded:
    """The call of a generation, of 2.5 s."""
    reported = facts.CallEnded(
        "headrace.v1.InferenceService/Generate",
        "OK",
        0,
        SECOND_NS,
        3 * SECOND_NS + SECOND_NS // 2,
        f"request-{number}",
        span(number),
    )
    return msgspec.structs.replace(reported, **changed)


def engine_facts(**changed: Any) -> facts.EngineFacts:
    """A device that copies 1 TB/s and multiplies 100 TFLOP/s, with 1 GB of weights."""
    reported = facts.EngineFacts(
        engine=ENGINE,
        model=MODEL,
        device="test",
        weight_bytes=1_000_000_000,
        flops_per_token=1e9,
        flops_per_pair=1e4,
        flops_per_sample=1e8,
        kv_bytes_per_token=1000,
        copy_bytes_per_s=1e12,
        matmul_flops_per_s=1e14,
    )
    return msgspec.structs.replace(reported, **changed)


def engine_load(**changed: Any) -> facts.EngineLoad:
    """A backend with 3 of 64 rows in use and 400 of 1,000 blocks."""
    reported = facts.EngineLoad(
        engine=ENGINE,
        model=MODEL,
        running_sequences=3,
        max_running_sequences=64,
        waiting_requests=2,
        waiting_tokens=150,
        num_blocks=1000,
        free_blocks=500,
        cached_blocks=100,
        used_blocks=400,
        step_count=10,
        preemptions=1,
        prefix_query_tokens=1000,
        prefix_hit_tokens=250,
        late_work=0,
    )
    return msgspec.structs.replace(reported, **changed)


def records(first: int, count: int, step_ns: int = 5_000_000, **columns: Any) -> step_records.Records:
    """Steps in a row, `step_ns` from result to result, 1 ms of it idle; 32 sequences decode."""
    made = np.zeros(count, step_records.RECORD)
    ids = np.arange(first, first + count)
    made["step_id"] = ids
    made["planned_at_ns"] = ids * step_ns
    made["started_at_ns"] = ids * step_ns
    made["finished_at_ns"] = ids * step_ns + step_ns - 1_000_000
    made["settled_at_ns"] = made["finished_at_ns"] + 100_000
    for name in ("num_sequences", "num_decodes", "num_samples"):
        made[name] = 32
    made["context_tokens"] = 32 * 500
    made["num_blocks"] = 1000
    for name, values in columns.items():
        made[name] = values
    return made


def steps(made: step_records.Records, engine: str = ENGINE) -> facts.Steps:
    """Steps as they are reported."""
    return facts.Steps(engine, 0, made.tobytes())


def everything(first_step: int = 1, number: int = 7) -> Iterator[tuple[facts.Hello, facts.Fact]]:
    """One fact of each kind that figures are made of, generations included.

    Totals and ids grow with the arguments.
    """
    yield BACKEND, engine_facts()
    refusals = dict.fromkeys(("queue_full", "deadline"), number)
    yield (
        BACKEND,
        engine_load(
            step_count=first_step,
            preemptions=number,
            prefix_query_tokens=100 * number,
            prefix_hit_tokens=30 * number,
            late_work=number,
            restarts=number,
            refusals=refusals,
        ),
    )
    mix = {"num_prefill_tokens": [0, 256, 64, 0] * 5, "draft_tokens": 4, "accepted_tokens": 3, "attention_pairs": 9000}
    made = records(first_step, 20, flags=step_records.StepFlag.CAPTURED, **mix)
    made["num_decodes"][1::4] = 0
    yield BACKEND, steps(made)
    yield SERVICE, facts.ServiceLoad(5, 4, 4096)
    yield SERVICE, facts.Dropped(3, 0)
    yield SERVICE, facts.LinesLost(2)
    yield SERVICE, generation(number)
    yield SERVICE, generation(number + 1000, finish_reasons=["error"], error_type="INTERNAL")
    yield SERVICE, call(number)
    yield SERVICE, call(number, status="INTERNAL")
