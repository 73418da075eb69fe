"""Models with recurrent layers: engine and runner together, against transformers.

A row's state belongs to whoever has the row, is empty when a sequence begins, or what was kept at
the end of its prefix, and follows outputs that go on where another one stands.
"""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from tests.engine.harness import request
from tests.models.checkpoints import CONFIGS
from tests.support.engine_on_runner import greedy
from tests.support.examples import examples
from tests.worker.step.test_cache_groups import Made, Schedule, check_schedule, prompt_of, schedules

from headrace_backend.engine.scheduling import checkpoint_places
from headrace_backend.step.plan import ForwardPlan, StepPlan
from headrace_backend.worker.step import row_states
from headrace_request.beam_search import BeamSearch
from headrace_request.selection_rules import NO_SAMPLING


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("recurrent"), CONFIGS["qwen3.5-order-tied"]())


def test_tokens_are_those_of_transformers_in_rows_that_are_used_again(made: Made) -> None:
    """Chunks of 16, more requests than rows: each row has several sequences one after the other."""
    prompts = [prompt_of(length, length) for length in (80, 3, 21, 1, 40)]
    found = made.engine(max_num_seqs=3).outputs([greedy(prompt, 12) for prompt in prompts])
    assert found == [[made.expected(tuple(prompt), 12)] for prompt in prompts]


def test_all_states_are_read_before_any_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a copy takes several pieces: lines hand theirs on in a circle."""
    monkeypatch.setattr(row_states, "_PIECE_ELEMENTS", 7)
    states = row_states.allocate_row_states(3, 5, torch.device("cpu"), num_checkpoints=2)
    states.copy_(torch.arange(30.0).view(6, 5))
    expected = states.clone()
    expected[[1, 4, 0]] = states[[0, 1, 4]]
    sources, targets = (np.array(lines, np.int32) for lines in ([0, 1, 4], [1, 4, 0]))
    row_states.copy_planned_states(ForwardPlan(state_sources=sources, state_targets=targets), [states])
    assert torch.equal(states, expected)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are kept at the end of each block that a step ends with."""
    monkeypatch.setattr(checkpoint_places, "LEAST_STOP_TOKENS", 16)
    monkeypatch.setattr(checkpoint_places, "LEAST_MOVE_TOKENS", 16)


@pytest.mark.usefixtures("often")
def test_prompts_begin_behind_kept_states(made: Made) -> None:
    """They are kept where prompts part, at a prompt's own end, and behind an answer."""
    engine, shared, found = made.engine(num_checkpoints=8, max_num_batched_tokens=64), prompt_of(100), []
    for own in ([1, 2], [3, 4, 5], [6], [6], [*made.expected((*shared, 6), 40), 7]):
        before = engine.engine._scheduler.stats.num_prefix_hit_tokens
        prompt = (*shared, *([6] if len(own) > 3 else []), *own)
        assert engine.outputs([greedy(list(prompt), 40)]) == [[made.expected(prompt, 40)]]
        found.append(engine.engine._scheduler.stats.num_prefix_hit_tokens - before)
    assert found == [0, 96, 96, 96, 128]


@pytest.mark.usefixtures("often")
def test_outputs_and_beams_begin_behind_kept_states(made: Made) -> None:
    prompt, found = prompt_of(53), []
    for num_checkpoints in (0, 4):
        engine = made.engine(num_checkpoints=num_checkpoints, max_num_seqs=8)
        engine.outputs([greedy(prompt, 1)])
        beams = {"beam_search": BeamSearch(3), "n": 2, "temperature": NO_SAMPLING.temperature}
        sampled = greedy(prompt, 20, n=3, temperature=0.9, seed=7)
        found.append(engine.outputs([sampled, request(prompt, 12, **beams)]))
        assert engine.engine._scheduler.stats.num_prefix_hit_tokens == (2 * 48 if num_checkpoints else 0)
    assert found[0] == found[1]


def test_no_prompt_begins_with_what_another_computed_without_kept_states(made: Made) -> None:
    engine, shared = made.engine(), prompt_of(100)
    for own in ([1, 2], [3, 4, 5]):
        assert engine.outputs([greedy(shared + own, 8)]) == [[made.expected((*shared, *own), 8)]]
    assert engine.engine._scheduler.stats.num_prefix_hit_tokens == 0


@pytest.mark.slow  # The property below preempts as well.
def test_preempted_sequences_begin_with_an_empty_state(made: Made) -> None:
    engine = made.engine(14)
    prompts = [prompt_of(60, seed) for seed in range(4)]
    found = engine.outputs([greedy(prompt, 60) for prompt in prompts])
    assert found == [[made.expected(tuple(prompt), 60)] for prompt in prompts]
    assert engine.engine._scheduler.stats.num_preemptions > 0


def test_outputs_go_on_from_their_prompts_state(made: Made) -> None:
    """Outputs begin alone if others have the rows, and else with the prompt's state."""
    prompt, found = prompt_of(53), []
    for num_others, num_copies in ((0, 2), (1, 1), (2, 0)):
        engine = made.engine(max_num_seqs=3)
        others = [engine.add(greedy(prompt_of(9, seed), 20)) for seed in range(num_others)]
        engine.checked_step()
        [outputs] = engine.outputs([greedy(prompt, 12, n=3, temperature=0.9, seed=7)])
        found.append(outputs)
        plans = [StepPlan.decode(plan) for plan in engine.worker.computed]
        assert sum(plan.forward.state_sources.size for plan in plans) == num_copies
        assert [other.tokens[0] for other in others] == [
            made.expected(tuple(prompt_of(9, seed)), 20) for seed in range(num_others)
        ]
    assert found[0] == found[1] == found[2]
    assert len(set(map(tuple, found[0]))) == 3


def test_beams_take_over_their_parents_states(made: Made) -> None:
    prompts = [prompt_of(length, length) for length in (30, 45)]
    engine = made.engine(max_num_seqs=8)
    options = {"beam_search": BeamSearch(3), "n": 2, "temperature": NO_SAMPLING.temperature}
    found = engine.outputs([request(prompt, 12, **options) for prompt in prompts])
    for prompt, outputs in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        wanted = made.theirs.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=3, num_return_sequences=2, do_sample=False,
            max_new_tokens=12, pad_token_id=0,
        )  # fmt: skip
        assert outputs == wanted[:, len(prompt) :].tolist()
    plans = [StepPlan.decode(plan) for plan in engine.worker.computed]
    assert sum(plan.forward.state_sources.size for plan in plans) > 4


@pytest.mark.usefixtures("often")
@hypothesis.settings(
    max_examples=examples(30, least=3), deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(
    jobs=st.lists(schedules, min_size=1, max_size=6),
    num_blocks=st.integers(12, 40),
    budget=st.sampled_from([16, 23, 50]),
    rows=st.integers(1, 4),
    num_checkpoints=st.integers(0, 6),
)
def test_no_sequence_reads_a_state_that_nobody_may_find(
    made: Made, jobs: list[Schedule], num_blocks: int, budget: int, rows: int, num_checkpoints: int
) -> None:
    """States of rows that nobody has, or that somebody takes, are full of NaN.

    So are checkpoints that were given up.
    """
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": rows, "num_checkpoints": num_checkpoints}
    check_schedule(made, jobs, num_blocks, **settings)
