"""What drafts add to a step where the worker has timed its graphs."""

from __future__ import annotations

import numpy as np
import pytest

from headrace_backend.engine.scheduling.draft_costs import DraftCosts, DraftedGraphs
from headrace_backend.engine.scheduling.step_time import StepLoad, StepTimeModel

GRAPHS = ((16, 4000.0), (32, 4100.0), (64, 5000.0), (128, 4990.0))


def test_a_step_takes_the_smallest_graph_that_holds_it() -> None:
    graphs = DraftedGraphs(GRAPHS)
    assert graphs.time_us(np.array([1, 16, 17, 64])).tolist() == [4000, 4000, 4100, 5000]
    # A larger graph that was faster was so by accident.
    assert float(graphs.time_us(128)) == 5000
    # None holds twice as many.
    assert float(graphs.time_us(256)) == 10_000


def test_drafts_that_fill_a_graph_cost_nothing() -> None:
    costs = DraftCosts(4000.0, 10, 0.0, 0.0, 100.0, (), np.empty(0), DraftedGraphs(GRAPHS))
    assert costs.full_counts.tolist() == [6, 22, 54, 118]
    times = costs.step_us(np.array([0, 1, 6, 7]), np.array([0, 1, 1, 1])).tolist()
    assert times == [4000, 4100, 4100, 4200]


def test_without_timed_graphs_tokens_cost_what_was_learned() -> None:
    costs = StepTimeModel().draft_costs_us(StepLoad(1, 100))
    assert not costs.graphs and costs.full_counts.size == 0
    assert costs.step_us(2, 1) > costs.step_us(1, 1) > costs.bare_us


def test_what_graphs_add_is_not_learned_twice() -> None:
    """A device whose drafts cost what their graphs take and 200 us: that much is learned."""
    model = StepTimeModel()
    model.drafted_graphs = DraftedGraphs([(tokens, 4000.0 + 10 * tokens) for tokens in range(16, 300, 16)])
    loads = [StepLoad(32, 3200, num_draft_tokens=count) for count in (0, 31, 64, 0, 128, 200)]
    for step in range(1200):
        load = loads[step % len(loads)]
        added = float(model.drafted_graphs.added_us(32, load.num_draft_tokens)) + 200 if load.num_draft_tokens else 0
        model.observe(load, 4300.0 + added)
    for load in loads:
        added = float(model.drafted_graphs.added_us(32, load.num_draft_tokens)) + 200 if load.num_draft_tokens else 0
        assert model.predict_us(load) == pytest.approx(4300 + added, rel=0.01)
        costs = model.draft_costs_us(StepLoad(32, 3200))
        assert float(costs.step_us(load.num_draft_tokens, 0)) == pytest.approx(4300 + added, rel=0.01)


def test_a_step_with_prompts_takes_other_graphs() -> None:
    model = StepTimeModel()
    model.drafted_graphs = DraftedGraphs(GRAPHS)
    load = StepLoad(8, 800)
    load.add_chunk(0, 64)
    assert not model.draft_costs_us(load).graphs
    load.num_draft_tokens = 8
    unknown = StepTimeModel()
    assert model.predict_us(load) == unknown.predict_us(load)
