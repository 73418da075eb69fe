"""`headrace plan --fleet`: fleets are simulated behind the real routing, and say what they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.support.running_server import environment

from headrace_supervisor.plan import command as plan_command
from headrace_supervisor.plan import fleet as fleet_module
from headrace_supervisor.plan.capacity import GPUS, Demand, RankSizes, predict, prompt_s
from headrace_supervisor.plan.command import plan
from headrace_supervisor.plan.fleet import Fleet, Outcome, Simulation
from headrace_supervisor.plan.fleet_table import Asked, fleet_rows

# Llama-3.1-8B in bf16 on one card.
SIZES = RankSizes(1, 32, 8192, 2 * 7_504_000_000, 7_504_000_000, 131_072, 900_000, 512)
GPU = GPUS["h200"]
SHARED = Demand(400, 512, 128, 20.0, cached=384)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of the requests."""
    monkeypatch.setattr(fleet_module, "_LEAST_ARRIVALS", 1000)
    monkeypatch.setattr(fleet_module, "_ARRIVALS_EACH", 20)


def fleet(engines: int = 8, demand: Demand = SHARED, **changes: Any) -> Fleet:
    return Fleet(SIZES, GPU, engines, 2, demand, prefixes=40, lost=1)._replace(**changes)


def test_beginnings_are_cached_and_the_same_seed_gives_the_same_figures() -> None:
    found = Simulation(fleet()).run()
    assert found.hit_share > 0.95
    assert found[:6] == Simulation(fleet()).run()[:6]
    # What is shared less often than it is evicted helps little.
    many = Simulation(fleet(prefixes=20_000)).run()
    assert many.hit_share < found.hit_share - 0.2 and many.ttft_p95_s > found.ttft_p95_s


def test_streams_of_lost_engines_go_on_after_a_pause() -> None:
    none, one, half = (Simulation(fleet(lost=lost)).run() for lost in (0, 1, 4))
    assert (none.moved, none.pause_p99_s) == (0, 0)
    assert 0 < one.moved < half.moved
    # A moved stream's prompt is computed anew, at least.
    assert half.pause_p99_s >= one.pause_p99_s > prompt_s(SIZES, GPU, 512 - 384)


def test_what_moves_are_the_streams_of_the_busiest_engines() -> None:
    """By Little's law an engine has rate times duration of them on the average."""
    calm = fleet(demand=SHARED._replace(users=200))
    mean = predict(SIZES, GPU, calm.demand).active
    busiest, all_but_one = (Simulation(calm._replace(lost=lost)).run().moved for lost in (1, 7))
    assert mean < busiest < all_but_one
    # All but the quietest: near the mean, because few are left out.
    assert 0.7 * mean < all_but_one / 7 < 1.6 * mean


def test_a_large_fleet_is_not_tried_with_more_users_than_a_small_one_held(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []

    def run(simulation: Simulation) -> Outcome:
        tried.append((simulation._fleet.engines, simulation._fleet.demand.users))
        holds = len(tried) > 2
        return Outcome(0.1, 0.1 if holds else 9.0, 0.01, 1.0, 3, 0.1, 10, 1e-5)

    monkeypatch.setattr(Simulation, "run", run)
    asked = Asked(SIZES, GPU, SHARED, 1, 40, 0.01, 1.0, None, None)
    [row] = fleet_rows(asked, [300])
    assert [engines for engines, _ in tried] == [100, 100, 100, 300]
    assert tried[2][1] == tried[3][1] and row["users"] == 300 * tried[3][1]


def test_the_nearer_to_what_an_engine_can_do_the_longer_everybody_waits() -> None:
    calm, busy = (Simulation(fleet(demand=SHARED._replace(users=users, cached=0))).run() for users in (200, 1400))
    assert busy.ttft_p95_s > calm.ttft_p95_s and busy.itl_p95_s > calm.itl_p95_s


def test_what_is_cached_costs_no_prompt_time() -> None:
    cold, warm = (predict(SIZES, GPU, SHARED._replace(cached=cached)) for cached in (0, 384))
    assert warm.prompt_share == pytest.approx(cold.prompt_share / 4, rel=0.1)


def run(*arguments: str) -> Result:
    return CliRunner(env=environment()).invoke(plan, ["--shape", "llama-3.1-8b", *arguments])


@pytest.fixture
def answered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are given here; `test_plan_command` asks the process that knows them."""

    def asked(question: dict[str, Any]) -> list[dict[str, Any]]:
        return [SIZES._asdict() | {"quantize": "off", "refused": ""}]

    monkeypatch.setattr(plan_command, "_asked", asked)


@pytest.mark.slow  # Its parts are tested beside it.
@pytest.mark.usefixtures("answered_here")
def test_fleets_say_users_cards_and_money() -> None:
    arguments = ["--fleet", "8,4", "--think-s", "20", "--shared-tokens", "256", "--card-hour", "2.5"]
    ended = run(*arguments, "--json")
    assert ended.exit_code == 0, ended.output
    four, eight = json.loads(ended.output)
    assert (four["engines"], four["cards"], four["per_hour"]) == (4, 4, 10.0)
    assert 1.5 * four["users"] <= eight["users"] <= 2 * four["users"] and eight["ttft_p95_ms"] <= 1000
    tokens_an_hour = eight["output_tokens_per_s"] * 3600
    assert eight["per_million_output_tokens"] == pytest.approx(20.0 / tokens_an_hour * 1e6)
    shown = run(*arguments, "--users", str(3 * eight["users"]))
    assert "take 24 engines, 24 cards, 60 an hour; no fleet here holds them" in shown.output
    assert "Zipf" in shown.output and "Not in it" in shown.output


# What a fleet holds is above.
@pytest.mark.slow
@pytest.mark.usefixtures("answered_here")
def test_targets_that_no_fleet_meets_end_with_1() -> None:
    ended = run("--fleet", "2", "--target-ttft-ms", "0.001")
    assert ended.exit_code == 1 and "too slow" in ended.output
    assert run("--fleet", "2", "--target-itl-ms", "0.001").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--card-hour", "2"], "--card-hour is for --fleet"),
        (["--shared-tokens", "0"], "--shared-tokens is for --fleet"),
        (["--fleet", "10,x"], "numbers of engines with commas between"),
        (["--fleet", ""], "numbers of engines"),
        (["--fleet", "1"], "numbers from 2 to 10000"),
        (["--fleet", "10001"], "numbers from 2 to 10000"),
        (["--fleet", "2,3,4,5,6,7,8,9,10"], "at most 8 numbers"),
        (["--fleet", "8", "--quantize", "any"], "engines of one kind"),
        (["--fleet", "8", "--shared-tokens", "512"], "a prompt has 512 tokens"),
        (["--fleet", "8", "--gpus", "2", "--pp", "2"], "its simulation does not know --pp"),
    ],
)
def test_what_makes_no_fleet_is_refused(arguments: list[str], reason: str) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2 and reason in ended.output
