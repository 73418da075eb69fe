"""The simulated tails of `headrace plan` agree with its balance, and come of what differs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.supervisor.test_plan_command import FOUR_70B, ONE_8B, run

from headrace_supervisor.plan.capacity import GPUS, Demand, RankSizes, predict, step_s
from headrace_supervisor.plan.tails import Spread, Tails, _Engine, _Request, tails

EQUAL, MIXED = Spread(0.0, 0.0, 8192), Spread(0.9, 0.7, 8192)
H200 = GPUS["h200"]


def simulated(sizes: RankSizes, demand: Demand, spread: Spread = EQUAL, seed: int = 0) -> Tails:
    found = tails(sizes, H200, demand, spread, predict(sizes, H200, demand), seed)
    assert found is not None
    return found


@pytest.mark.parametrize("sizes", [ONE_8B, FOUR_70B])
def test_one_user_waits_as_long_as_the_arithmetic_says(sizes: RankSizes) -> None:
    demand = Demand(1, 512, 256, 5.0)
    found = simulated(sizes, demand)
    assert found.answer_p50_s == pytest.approx(predict(sizes, H200, demand).answer_s, rel=0.02)
    assert found.answer_p95_s == pytest.approx(found.answer_p50_s)
    assert step_s(sizes, H200, 1, 512) < found.ttft_p50_s < 0.2


@pytest.mark.parametrize(("users", "within"), [(250, 0.05), (500, 0.05), (1000, 0.15)])
def test_many_users_are_in_the_balance_that_the_arithmetic_finds(users: int, within: float) -> None:
    demand = Demand(users, 521, 184, 45.0)
    balance, found = predict(FOUR_70B, H200, demand), simulated(FOUR_70B, demand)
    assert found.answer_p50_s == pytest.approx(balance.answer_s, rel=within)
    assert found.tokens_per_s == pytest.approx(users * 184 / (45 + balance.answer_s), rel=0.08)


def test_tails_come_of_lengths_that_differ_and_of_users() -> None:
    demand = Demand(1000, 521, 184, 45.0)
    equal, mixed = simulated(FOUR_70B, demand), simulated(FOUR_70B, demand, MIXED)
    few = simulated(FOUR_70B, demand._replace(users=250), MIXED)
    assert equal.answer_p95_s < 1.4 * equal.answer_p50_s
    assert mixed.answer_p95_s > 2 * mixed.answer_p50_s and mixed.ttft_p95_s > 1.5 * mixed.ttft_p50_s
    assert few.answer_p95_s < mixed.answer_p95_s and few.ttft_p95_s < mixed.ttft_p95_s
    # No user has a shorter wait by there being fewer than one.
    alone = simulated(FOUR_70B, demand._replace(users=1), MIXED)
    assert alone.answer_p95_s < few.answer_p95_s


def test_the_same_seed_is_the_same_answer() -> None:
    demand = Demand(64, 400, 100, 10.0)
    assert simulated(ONE_8B, demand, MIXED) == simulated(ONE_8B, demand, MIXED)
    assert simulated(ONE_8B, demand, MIXED) != simulated(ONE_8B, demand, MIXED, seed=1)


@given(
    requests=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=40),
    rows=st.integers(1, 16),
    blocks=st.integers(3500, 20_000),
)
def test_every_request_gets_all_of_its_tokens_within_rows_and_cache(
    requests: list[tuple[int, int]], rows: int, blocks: int
) -> None:
    sizes = ONE_8B._replace(max_num_seqs=rows, kv_tokens=blocks)
    engine = _Engine(sizes, H200)
    asked = [_Request(0.0, prompt, output, prompt) for prompt, output in requests]
    for request in asked:
        engine.add(request)
    steps: dict[int, list[int]] = {id(request): [] for request in asked}
    number = 0
    while not engine.is_idle:
        number += 1
        seconds, begun, ended = engine.step()
        assert seconds > 0 and len(engine._rows) + len(engine._admitted) <= rows and engine._held <= blocks
        for request in (*begun, *ended):
            steps[id(request)].append(number)
    for request in asked:
        first, last = steps[id(request)]
        assert last - first == request.output - 1 and request.left == 0
    assert engine._context == 0 and engine._held == 0 and engine._waiting_tokens == 0


USERS = ("--shape", "llama-3.1-8b", "--gpus", "2", "--max-model-len", "8192", "--think-s", "20", "--users", "600")


def rows(*options: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(*USERS, "--json", *options).output)
    return found


# Asks the process that imports torch.
@pytest.mark.slow
def test_targets_are_of_95_in_100_and_what_is_missing_is_said_in_seconds_and_gpus() -> None:
    one, two = rows("--output-spread", "0.7")
    assert one["holds"] and one["answer_p95_s"] > one["answer_s"] and one["ttft_p95_ms"] > one["ttft_p50_ms"]
    target = min(one["answer_p95_s"], two["answer_p95_s"]) - 0.2
    missed = rows("--output-spread", "0.7", "--target-answer-s", str(target))
    assert not any(row["holds"] for row in missed)
    for row in missed:
        assert row["enough_replicas"] is None or row["enough_replicas"] > row["replicas"]
    shown = run(*USERS, "--output-spread", "0.7", "--target-answer-s", str(target)).output
    assert "95 in 100 whole answers take" in shown and "too long" in shown and "GPUs, keep to it" in shown
    never = run(*USERS, "--target-ttft-ms", "0.001")
    assert never.exit_code == 1 and "95 in 100 first tokens take" in never.output
    assert "no number of such engines up to 64 keeps to it" in never.output


@pytest.mark.parametrize("option", ["--prompt-spread", "--output-spread", "--target-answer-s"])
def test_fleets_know_no_spread(option: str) -> None:
    ended = run("--shape", "llama-3.1-8b", "--fleet", "2", option, "0.5")
    assert ended.exit_code == 2 and ended.stderr.startswith(f"headrace: {option} is for one machine")
