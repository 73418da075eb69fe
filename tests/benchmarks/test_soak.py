"""The soak finds nothing in a healthy engine, and each of its rules finds what breaks it."""

from __future__ import annotations

import asyncio
import json
import pathlib
import subprocess
import sys
from typing import cast

import numpy as np
import pytest
from benchmarks import figures, soak_callers, soak_checks, soak_server
from benchmarks.backend_process import BackendProcess
from benchmarks.engine_session import Answer, EngineSession, Prompt
from benchmarks.soak_checks import Sent
from benchmarks.soak_requests import CPU_SIZES, GPU_SIZES, KINDS, Cancel, RequestMaker, SoakRequest
from benchmarks.token_log import TokenLog

from headrace_protos.engine.v1 import engine_pb2

STOP, LENGTH = engine_pb2.OUTPUT_END_REASON_STOP, engine_pb2.OUTPUT_END_REASON_LENGTH
CANCELLED, DEADLINE = engine_pb2.OUTPUT_END_REASON_CANCELLED, engine_pb2.OUTPUT_END_REASON_DEADLINE
ERROR = engine_pb2.OUTPUT_END_REASON_ERROR
BY_CALLER = Cancel(0.5, engine_pb2.ABORT_CAUSE_CANCELLED)


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.bench_soak", "--device", "cpu", *arguments]
    return subprocess.run(
        command, cwd=figures.ROOT, env=figures.environment(), capture_output=True, text=True, timeout=600, check=False
    )


# A real engine; the rules of the soak and its refusals are tried below.
@pytest.mark.slow
def test_a_healthy_engine_is_soaked_and_nothing_is_left(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "soak.json"
    done = soak("--requests", "150", "--threads", "1", "--seed", "7", "--git", "abc1234", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert record == json.loads(done.stdout.splitlines()[-1])
    assert record["ok"] and all(check["ok"] for check in record["checks"])
    assert (record["name"], record["git"], record["requests"], record["late_work"]) == ("soak", "abc1234", 150, 0)
    # What is not there was not tested.
    assert set(record["kinds"]) == set(KINDS)
    assert record["ends"]["stop"] and record["ends"]["length"] and record["ends"]["cancelled"]
    assert record["cached_tokens"] and record["cancels_in_time"]
    assert "/tmp" not in json.dumps(record["engine"])


class Stream:
    """Answers every question after whoever asked the first one was cancelled."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[engine_pb2.FromEngine] = asyncio.Queue()
        self.asked: list[engine_pb2.ToEngine] = []

    async def write(self, message: engine_pb2.ToEngine) -> None:
        self.asked.append(message)
        if len(self.asked) == 2:
            for asked in self.asked:
                self.answers.put_nowait(engine_pb2.FromEngine(load=engine_pb2.Load(query_id=asked.load.query_id)))

    async def read(self) -> engine_pb2.FromEngine:
        return await self.answers.get()


async def test_an_answer_that_nobody_waits_for_any_more_harms_nobody() -> None:
    session = EngineSession(Stream(), cast("BackendProcess", None))
    reader = asyncio.ensure_future(session.read())
    gone = asyncio.ensure_future(session.load())
    await asyncio.sleep(0)
    gone.cancel()
    load = await asyncio.wait_for(session.load(), 60)
    assert load.query_id == 2 and not reader.done()
    reader.cancel()


def test_mistakes_are_refused_in_a_line() -> None:
    for arguments, reason in ((["--requests", "-1"], "--requests"), (["--set", "block_size=17"], "block_size")):
        refused = soak(*arguments)
        assert refused.returncode == 2 and reason in refused.stderr and "Traceback" not in refused.stderr


def test_a_request_depends_on_seed_and_index_alone() -> None:
    one, other = RequestMaker(3, CPU_SIZES, 4096, 1025), RequestMaker(3, CPU_SIZES, 4096, 1025)
    assert [one(index) for index in (5, 2)] == [other(index) for index in (2, 5)][::-1]
    assert one(2) != RequestMaker(4, CPU_SIZES, 4096, 1025)(2)


def test_requests_fit_the_context_and_cover_the_lengths() -> None:
    make = RequestMaker(0, GPU_SIZES, 128_256, 131_072)
    prompts = [make(index).prompt for index in range(4000)]
    lengths = np.asarray([prompt.num_tokens for prompt in prompts])
    assert lengths.min() == 1 and GPU_SIZES.long_prompt < lengths.max() <= GPU_SIZES.longest_prompt
    assert {1, 2, 3, 4} == {prompt.n for prompt in prompts}
    small = RequestMaker(0, CPU_SIZES, 512, 256)
    assert all(
        prompt.num_tokens + prompt.max_tokens <= 256 for prompt in (small(index).prompt for index in range(2000))
    )


def sent(
    tokens: list[int],
    *ends: engine_pb2.OutputEnd,
    most: int = 4,
    cancel: Cancel | None = None,
    was_active: bool = False,
    stop_ids: tuple[int, ...] = (),
    allowed: tuple[int, ...] = (),
    banned: tuple[tuple[int, ...], ...] = (),
    logprobs: int | None = None,
    usage: int | None = None,
) -> Sent:
    log = TokenLog()
    columns = [np.full(len(tokens), 1, "<u4"), np.asarray(tokens, "<u4"), np.zeros(len(tokens), "<u2")]
    log.append(0.0, *(column.tobytes() for column in columns))
    answer = Answer(log, 1, "request")
    answer.ends = list(ends)
    answer.done = engine_pb2.RequestDone(prompt_tokens=2, output_tokens=len(tokens) if usage is None else usage)
    prompt = Prompt(bytes(8), 2, most, logprobs=logprobs)
    request = SoakRequest("greedy", prompt, frozenset(stop_ids), frozenset(allowed), banned, cancel)
    aborted = engine_pb2.Aborted(found=True, was_active=was_active) if cancel else None
    return Sent(0, request, answer, aborted)


def end(reason: int, token: int | None = None) -> engine_pb2.OutputEnd:
    return engine_pb2.OutputEnd(reason=engine_pb2.OutputEndReason.ValueType(reason), stop_token_id=token)


async def test_answers_as_they_must_be_have_no_faults() -> None:
    healthy = [
        sent([5, 6, 7, 8], end(LENGTH)),
        sent([5, 9], end(STOP, 9), stop_ids=(9,)),
        sent([5], end(CANCELLED), cancel=BY_CALLER, was_active=True),
        sent([], end(CANCELLED), cancel=BY_CALLER, was_active=True),
        # The cancel came too late.
        sent([5, 6, 7, 8], end(LENGTH), cancel=BY_CALLER),
        sent([5, 5, 6, 5], end(LENGTH), allowed=(5, 6), banned=((6, 6), (7,))),
    ]
    assert [soak_checks.faults_of(one) for one in healthy] == [[]] * len(healthy)
    assert soak_checks.answers_check(healthy).ok


async def test_every_broken_rule_is_a_fault() -> None:
    broken = [
        (sent([5, 6, 7], end(LENGTH)), "ended by its length after 3 of 4"),
        (sent([5, 6, 7, 8, 9], end(LENGTH)), "ended by its length after 5 of 4"),
        (sent([5, 6, 7, 8], end(LENGTH), usage=3), "usage says 2 -> 3"),
        (sent([5, 6, 7, 8]), "ends came for []"),
        (sent([5, 6, 7, 8], end(LENGTH), end(LENGTH)), "ends came for [0, 0]"),
        (sent([9, 6, 7, 8], end(LENGTH), stop_ids=(9,)), "went on after a stop token at 0"),
        (sent([5, 6], end(STOP, 9), stop_ids=(9,)), "ended by stop 9 after 2 tokens"),
        (sent([], end(STOP, 9), stop_ids=(9,)), "ended by stop 9 after 0 tokens"),
        (sent([5], end(CANCELLED)), "for which nobody asked"),
        (sent([5], end(CANCELLED), cancel=BY_CALLER), "for which nobody asked"),
        (sent([5], end(DEADLINE), cancel=BY_CALLER, was_active=True), "ended by deadline"),
        (sent([5, 6, 7, 8], end(CANCELLED), cancel=BY_CALLER, was_active=True), "with all its 4 tokens"),
        (sent([5], end(ERROR)), "ended by error"),
        (sent([5, 6, 7, 8], end(LENGTH), allowed=(5, 6, 7)), "token 8 against a bias"),
        (sent([5, 6, 7, 8], end(LENGTH), banned=((6, 7),)), "banned tokens (6, 7)"),
        (sent([5, 6, 7, 8], end(LENGTH), logprobs=2), "0 log probabilities for 4 tokens"),
    ]
    for one, fault in broken:
        assert any(fault in found for found in soak_checks.faults_of(one)), (fault, soak_checks.faults_of(one))
        assert not soak_checks.answers_check([one]).ok
    unended = sent([5], end(LENGTH))
    unended.answer.done = None
    assert soak_checks.faults_of(unended) == ["has not ended"]


@pytest.mark.parametrize(
    "left",
    [{"late_work": 1}, {"running_sequences": 1}, {"waiting_requests": 1}, {"used_blocks": 1}, {"free_blocks": 2}],
)
def test_what_is_left_in_the_engine_is_found(left: dict[str, int]) -> None:
    clean = {"kv_blocks": 8, "free_blocks": 3, "cached_blocks": 5}
    assert all(check.ok for check in soak_checks.engine_checks(engine_pb2.Load(**clean)))
    assert sum(not check.ok for check in soak_checks.engine_checks(engine_pb2.Load(**clean | left))) == 1


def test_memory_that_grows_is_found() -> None:
    mib = 1 << 20
    filled = [100 * mib] * 4 + [900 * mib] * 12
    assert soak_checks.memory_check("worker", filled).ok
    assert not soak_checks.memory_check("worker", filled[:-1] + [965 * mib]).ok
    assert not soak_checks.memory_check("worker", filled[:3]).ok
    assert not soak_checks.descriptors_check(30, 60).ok


# An engine is soaked above; every kind of call has its tests in tests/e2e.
@pytest.mark.slow
def test_a_whole_server_is_soaked_with_every_kind_of_call(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "soak.json"
    seconds = 12
    kinds: dict[str, int] = {}
    while set(kinds) != set(soak_callers.KINDS):
        done = soak("--through", "server", "--seconds", str(seconds), "--threads", "1", "--json", str(path))
        record = json.loads(path.read_text())
        kinds = record["calls"]
        seconds *= 2
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"] for check in record["checks"]}
    assert record["ok"] and {"calls", "canary", "processes", "headrace_service memory"} <= checks


@pytest.mark.parametrize(
    "samples, ok",
    [
        ([100 << 20] * 40, True),
        ([(100 << 20) + index * (1 << 18) for index in range(40)], True),
        ([(100 << 20) + index * (1 << 19) for index in range(40)], False),
        ([1, 2, 3], False),
    ],
    ids=["flat", "5 MiB", "10 MiB", "too few"],
)
def test_growth_of_a_process_between_quarters_is_judged(samples: list[int], ok: bool) -> None:
    assert soak_server.flat_check("headrace_service", samples).ok is ok


def test_a_call_that_ends_as_it_must_not_fails_the_soak() -> None:
    outcomes = soak_callers.Outcomes()
    assert not soak_server.outcomes_check(outcomes).ok, "nothing was called"
    outcomes.calls["chat"] += 1
    assert soak_server.outcomes_check(outcomes).ok
    outcomes.wrong.append("chat of caller 3: Internal: ...")
    assert "caller 3" in soak_server.outcomes_check(outcomes).message
