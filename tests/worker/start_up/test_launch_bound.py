"""Which long steps are captured.

Those whose launches take the host long, up to the first that does not.
"""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_backend import device_defaults
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import StepPlan
from headrace_backend.worker.start_up import launch_bound
from headrace_backend.worker.start_up.launch_bound import host_share, launch_bound_sizes, tried_sizes
from headrace_backend.worker.start_up.synthetic_steps import BlockPool

SIZES = device_defaults.long_graph_sizes(8192)


@pytest.mark.parametrize(
    ("budget", "longest", "count"),
    [(512, None, 0), (768, None, 0), (800, 800, 1), (2000, 2000, 8), (4096, 4096, 12), (8192, 7936, 15)],
)
def test_what_there_is_to_choose_from_ends_with_the_budget_or_what_is_worth_a_try(
    budget: int, longest: int | None, count: int
) -> None:
    sizes = device_defaults.long_graph_sizes(budget)
    assert len(sizes) == count and sorted(set(sizes)) == list(sizes)
    assert not sizes or sizes[-1] == longest
    captured = device_defaults.mixed_graph_sizes(budget) + sizes
    assert all(after <= before * 5 / 4 for before, after in zip(captured, captured[1:], strict=False) if before >= 768)


@given(st.sets(st.integers(1, 10_000), min_size=1, max_size=30).map(sorted))
def test_few_sizes_are_tried_and_none_is_far_from_one(sizes: list[int]) -> None:
    tried = tried_sizes(sizes)
    assert (tried[0], tried[-1]) == (sizes[0], sizes[-1])
    assert list(tried) == sorted(set(tried)) and set(tried) <= set(sizes)
    for size in sizes:
        assert 3 * size <= 4 * max(t for t in tried if t <= size)


def test_sizes_are_captured_up_to_the_first_that_hides_its_launches() -> None:
    # The host takes 50 ms for any step, the card 48 us a token: 2,048 tokens take it twice as long.
    def share(num_tokens: int) -> float:
        return min(1.0, 50_000 / (48 * num_tokens))

    assert launch_bound_sizes(SIZES, 4, share) == tuple(size for size in SIZES if size <= 1792)
    assert launch_bound_sizes(SIZES, 2, lambda _: 0.4) == ()
    assert launch_bound_sizes(SIZES, 2, lambda _: 0.9) == SIZES
    assert launch_bound_sizes((), 2, lambda _: 0.9) == ()


def test_one_rank_captures_what_its_launches_bind_and_no_more() -> None:
    # Padding then costs nothing: the host would have taken as long.
    assert launch_bound_sizes(SIZES, 1, lambda num_tokens: min(1.0, 1200 / num_tokens)) == SIZES[:4]
    assert launch_bound_sizes(SIZES, 1, lambda _: 0.8) == ()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_full_steps_have_a_graph_where_half_of_them_is_the_hosts(num_ranks: int) -> None:
    # The host takes 72 ms for any step, the card 9 us a token: as a mixture of experts is.
    def share(num_tokens: int) -> float:
        return min(1.0, 72_000 / (9 * num_tokens))

    assert launch_bound_sizes(SIZES, num_ranks, share, 8192) == (*SIZES, 8192)
    assert launch_bound_sizes(SIZES, num_ranks, share, 0) == SIZES
    assert launch_bound_sizes(SIZES, num_ranks, share, 32_768) == SIZES, "the host has more than half of the time left"
    assert launch_bound_sizes(SIZES[:3], num_ranks, share, SIZES[2]) == SIZES[:3]
    assert launch_bound_sizes((), num_ranks, share, 512) == ()


def test_full_steps_have_a_graph_beside_long_ones_that_hide_their_launches() -> None:
    # The host takes 33 ms for any step, the card 8 us a token: 8,192 tokens take it twice as long.
    def share(num_tokens: int) -> float:
        return min(1.0, 32_768 / (8 * num_tokens))

    assert launch_bound_sizes(SIZES, 1, share, 8192) == (*(size for size in SIZES if size <= 3840), 8192)
    assert launch_bound_sizes(SIZES, 4, share, 8192) == (*SIZES, 8192), "several ranks pad to what is half the host's"
    assert launch_bound_sizes(SIZES, 1, lambda size: 0.6, 8192) == (8192,)


def test_whether_full_steps_are_bound_is_not_asked_where_the_host_has_little_of_shorter_ones() -> None:
    asked: list[int] = []

    def share(num_tokens: int) -> float:
        asked.append(num_tokens)
        return 0.95 if num_tokens < 2000 else 0.4

    assert max(launch_bound_sizes(SIZES, 1, share, 8192)) < 2000 and 8192 not in asked


def test_there_is_no_gap_below_a_long_step_that_is_cut_and_has_twice_the_launches() -> None:
    # Otherwise steps that are a little longer than the first would be padded to the last.
    asked: list[int] = []

    def share(num_tokens: int) -> float:
        asked.append(num_tokens)
        return 1.0 if num_tokens < 1000 or num_tokens > 2000 else 0.3

    assert launch_bound_sizes(SIZES, 4, share) == (896,)
    assert max(asked) < 1500, "a step was tried that could not be taken"


class SlowHost:
    """Takes 2 ms to launch a step, 5 more the first time; its card is done 3 ms later.

    Time passes by these alone.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.steps: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> torch.Tensor:
        if plan.num_tokens:
            self.now_ms += 2.0 if self.steps else 7.0
            self.steps.append(plan)
        return torch.empty(0)

    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> None:
        return None

    def wait(self) -> None:
        self.now_ms += 3.0


@pytest.mark.parametrize("max_model_len", [2048, 300])
def test_the_share_is_that_of_a_step_whose_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, max_model_len: int
) -> None:
    host = SlowHost()
    clock = types.SimpleNamespace(perf_counter=lambda: host.now_ms / 1e3)
    monkeypatch.setattr(launch_bound, "time", clock)
    share = host_share(host, 896, max_model_len, 97, BlockPool(4, 16), host.wait)  # type: ignore[arg-type]
    assert share == pytest.approx(2 / 5)
    assert [step.num_tokens for step in host.steps] == [896, 896]
    assert max(host.steps[0].forward.counts) <= max_model_len
    # Experts of tokens that are all alike would be the same few.
    assert set(host.steps[0].forward.token_ids.tolist()) == set(range(97))
