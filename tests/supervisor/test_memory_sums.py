"""The sum of memory budgets: what fits beside what is loaded, and what refusals say."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_supervisor.models import memory_sums
from headrace_supervisor.models.memory_sums import Claim
from headrace_supervisor.refusals import Refused

GIB = 1 << 30
CARD = 80 * GIB


def refusal(new: Claim, loaded: list[Claim], cpu_bytes: int = 64 * GIB) -> Refused | None:
    try:
        memory_sums.check(new, loaded, cpu_bytes)
    except Refused as refused:
        return refused
    return None


def test_a_second_model_on_a_card_needs_budgets_on_both_sides() -> None:
    first = Claim("first", "cuda:0", 0, CARD)
    refused = refusal(Claim("second", "cuda:0", 20 * GIB), [first])
    assert refused is not None and refused.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "first has none" in str(refused)
    refused = refusal(Claim("second", "cuda:0", 0), [first._replace(budget_bytes=GIB)])
    assert refused is not None and "second has none" in str(refused)
    # Alone, on another card, or on the CPU, none is needed.
    assert refusal(Claim("second", "cuda:1", 0), [first]) is None
    assert refusal(Claim("second", "cpu", 0), [first, Claim("third", "cpu", 0)]) is None


def test_the_sum_is_held_against_the_card_as_its_worker_found_it() -> None:
    loaded = [Claim("a", "cuda:0", 40 * GIB, CARD), Claim("b", "cuda:0", 30 * GIB)]
    assert refusal(Claim("c", "cuda:0", 10 * GIB), loaded) is None
    refused = refusal(Claim("c", "cuda:0", 11 * GIB), loaded)
    assert refused is not None and refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "c 11.00 GiB + a 40.00 GiB + b 30.00 GiB = 81.00 GiB; cuda:0 has 80.00 GiB" in str(refused)
    # Nobody has seen the other card yet; its worker will.
    assert refusal(Claim("c", "cuda:1", 100 * GIB), loaded) is None


@given(
    budgets=st.lists(st.integers(0, 100 * GIB), max_size=5),
    new=st.integers(1, 100 * GIB),
    cpu_bytes=st.integers(1, 200 * GIB),
)
def test_a_refusal_names_the_largest_budget_that_fits(budgets: list[int], new: int, cpu_bytes: int) -> None:
    loaded = [Claim(f"m{index}", "cpu", budget) for index, budget in enumerate(budgets)]
    refused = refusal(Claim("new", "cpu", new), loaded, cpu_bytes)
    assert (refused is not None) == (sum(budgets) + new > cpu_bytes)
    if refused is not None:
        fits = int(str(refused).rpartition("at most ")[2].split()[0])
        assert fits == max(0, cpu_bytes - sum(budgets))
        assert not fits or refusal(Claim("new", "cpu", fits), loaded, cpu_bytes) is None


def test_the_machine_has_memory() -> None:
    assert memory_sums.machine_bytes() > 1 << 20


def test_models_without_budgets_share_a_cpu() -> None:
    with pytest.raises(Refused):
        memory_sums.check(Claim("a", "cpu", 2 * GIB), [Claim("b", "cpu", 0)], GIB)
    memory_sums.check(Claim("a", "cpu", 0), [Claim("b", "cpu", 2 * GIB)], GIB)


def test_a_model_of_several_ranks_takes_of_each_of_its_cards() -> None:
    loaded = [Claim("a", "cuda:1", 40 * GIB, CARD), Claim("b", "cuda:3", 0, CARD)]
    pair = Claim("pair", "cuda:0", CARD - 40 * GIB, ranks=2)
    assert refusal(pair, loaded) is None
    refused = refusal(pair._replace(budget_bytes=pair.budget_bytes + 1), loaded)
    assert refused is not None and "cuda:1 has" in str(refused)
    refused = refusal(pair._replace(device="cuda:2"), loaded)
    assert refused is not None and "models that share cuda:3 need a memory budget each, and b has none" in str(refused)
