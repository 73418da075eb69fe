"""Models with recurrent layers: whoever drafts, answers are those without, and states follow.

Engine and worker together, against transformers. States of rows that nobody has, or that somebody
takes, are full of NaN, and so are checkpoints that nobody may find.
"""

from __future__ import annotations

import pathlib
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.engine.harness import request
from tests.models.checkpoints import CONFIGS
from tests.support.engine_on_runner import EngineOnRunner, greedy
from tests.support.examples import examples
from tests.support.gguf_writer import from_folder
from tests.support.hybrid_mtp_models import HybridWithMtp
from tests.worker.step.test_cache_groups import Made, Schedule, check_schedule, prompt_of, qwen2, schedules

from headrace_backend.engine.scheduling import checkpoint_places
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.speculation.drafter import SettledTokens
from headrace_backend.worker.speculation.ngram_drafter import NgramDrafter
from headrace_backend.worker.step.cpu_draft_model import CpuDraftModel

NUM_DRAFTS = 4


def drafting(kind: str, num_drafts: int = NUM_DRAFTS) -> dict[str, Any]:
    """Settings with which so many tokens are drafted in each step."""
    draft_model = {"draft_model": pathlib.Path("draft")} if kind == "draft" else {}
    return {"speculate": kind, "speculate_tokens": str(num_drafts), "tokens_per_row": 1 + num_drafts, **draft_model}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("hybrid"), CONFIGS["qwen3.5-order-tied"]())


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model without states, of the same vocabulary."""
    return Made(tmp_path_factory.mktemp("other"), qwen2(2))


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> HybridWithMtp:
    return HybridWithMtp(tmp_path_factory.mktemp("mtp"), CONFIGS["qwen3.5"]())


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> HybridWithMtp:
    return HybridWithMtp(tmp_path_factory.mktemp("agreeing"), CONFIGS["qwen3.5"](), agrees=True)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are kept at the end of each block that a step may end with."""
    monkeypatch.setattr(checkpoint_places, "LEAST_STOP_TOKENS", 16)
    monkeypatch.setattr(checkpoint_places, "LEAST_MOVE_TOKENS", 16)


def counted(engine: EngineOnRunner, prompts: list[list[int]], count: int) -> tuple[list[list[int]], int, int]:
    """Greedy answers of requests that arrive together, and their drafts: all, and right ones."""
    readers = engine.readers_of([greedy(prompt, count) for prompt in prompts])
    done = [reader.done for reader in readers if reader.done is not None]
    drafts = sum(each.draft_tokens for each in done), sum(each.accepted_tokens for each in done)
    return [reader.tokens[0] for reader in readers], *drafts


def test_the_layer_of_a_gguf_file_is_that_of_the_folder(predicting: HybridWithMtp, tmp_path: pathlib.Path) -> None:
    gguf, _ = from_folder(predicting.path, "F32")
    _, head = predicting.pair(gguf.write(tmp_path / "model.gguf"))
    for name, parameter in predicting.head.named_parameters():
        torch.testing.assert_close(head.get_parameter(name), parameter)


# Other numbers are among those of the property below.
@pytest.mark.parametrize(
    ("kind", "num_drafts"),
    [("ngram", 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("suffix", 4), ("ngram", 8)))],
)
def test_drafts_that_are_looked_up_change_no_answer(made: Made, kind: str, num_drafts: int) -> None:
    """More requests than rows, prompts in chunks, and too few blocks for all."""
    prompts = [prompt_of(20, seed) * 3 for seed in range(4)] + [prompt_of(3)]
    engine = made.engine(16, max_num_seqs=3, **drafting(kind, num_drafts))
    found, drafted, right = counted(engine, prompts, 40)
    assert found == [made.expected(tuple(prompt), 40) for prompt in prompts]
    assert drafted > right > 10
    assert engine.engine._scheduler.stats.num_preemptions > 0


def test_drafts_of_a_model_change_no_answer(made: Made, other: Made) -> None:
    """A random model's, which are nearly all wrong."""
    prompts = [prompt_of(length, length) for length in (40, 3, 21)]
    found, drafted, _ = counted(made.engine(draft=other.ours, **drafting("draft")), prompts, 20)
    assert found == [made.expected(tuple(prompt), 20) for prompt in prompts] and drafted > 100


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "seed": 7, "n": 3},
        pytest.param({"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "top_k": 8}, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.2, "seed": 5, "min_tokens": 6, "top_p": 0.8}, marks=pytest.mark.slow),
    ],
)
def test_sampled_answers_are_those_without_drafts(made: Made, options: dict[str, Any]) -> None:
    """Outputs begin with their prompt's state, and go on by themselves."""
    asked = [request(prompt_of(21, seed) * 2, 24, **options) for seed in range(2)]
    again = [request(prompt_of(21, seed) * 2, 24, **options) for seed in range(2)]
    assert made.engine(max_num_seqs=8, **drafting("ngram")).outputs(asked) == made.engine(max_num_seqs=8).outputs(again)


def test_a_draft_that_the_model_cannot_compute_ends_no_row_of_a_model_without_states(
    made: Made, other: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States have taken in the token before the drafts, so rows that have some can't stay there."""
    prompt = prompt_of(20)
    expected = other.expected(tuple(prompt), 12)
    embedding = other.ours.model.embed_tokens
    assert embedding is not None and isinstance(embedding.weight, torch.Tensor)
    bad = next(token for token in range(len(embedding.weight)) if token not in prompt + expected)

    def propose(drafter: NgramDrafter, settled: SettledTokens) -> torch.Tensor:
        return torch.full((len(settled.rows), drafter.num_drafts), bad, dtype=torch.int32)

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    before = embedding.weight[bad].clone()
    with torch.inference_mode():
        embedding.weight[bad] = torch.nan
    try:
        assert other.engine(**drafting("ngram")).outputs([greedy(prompt, 12)]) == [[expected]]
    finally:
        with torch.inference_mode():
            embedding.weight[bad] = before
    for model, can_stay in ((made, False), (other, True)):
        speculation = model.engine(**drafting("ngram")).worker.runner.speculation
        assert speculation is not None and speculation.rows.can_stay is can_stay


@pytest.mark.usefixtures("often")
def test_prompts_begin_behind_states_that_were_kept_among_drafts(made: Made) -> None:
    """The next turn begins where an answer's block ends within what a step settles."""
    engine = made.engine(num_checkpoints=8, max_num_batched_tokens=64, **drafting("ngram"))
    prompt = tuple(prompt_of(25) * 2)
    answer = made.expected(prompt, 60)
    found, _, right = counted(engine, [list(prompt)], 60)
    assert found == [answer] and right > 4
    turn = [*prompt, *answer, 7]
    before = engine.engine._scheduler.stats.num_prefix_hit_tokens
    assert counted(engine, [turn], 20)[0] == [made.expected(tuple(turn), 20)]
    assert engine.engine._scheduler.stats.num_prefix_hit_tokens - before > len(prompt)


@pytest.mark.usefixtures("often")
@hypothesis.settings(
    max_examples=examples(30, least=3), deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(
    jobs=st.lists(schedules, min_size=1, max_size=5),
    num_blocks=st.integers(12, 40),
    budget=st.sampled_from([16, 23, 50]),
    rows=st.integers(1, 4),
    num_checkpoints=st.integers(0, 6),
    num_drafts=st.sampled_from([1, 3, 4, 8]),
)
def test_no_sequence_reads_another_ones_state(
    made: Made, jobs: list[Schedule], num_blocks: int, budget: int, rows: int, num_checkpoints: int, num_drafts: int
) -> None:
    """Chunks, preemptions, prefix hits and cancels in any order, with drafts that may be right."""
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": rows, "num_checkpoints": num_checkpoints}
    check_schedule(made, jobs, num_blocks, **settings, **drafting("ngram", num_drafts))


def test_the_layer_drafts_what_transformers_layer_says(
    predicting: HybridWithMtp, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[int, list[int]]] = []
    plain = CpuDraftModel.draft

    def draft(self: CpuDraftModel, drafted: DraftedRows) -> torch.Tensor:
        found = plain(self, drafted)
        places = self._rows.next_positions[torch.from_numpy(drafted.rows).long()] + 1
        noted.extend((int(place), row[:count]) for place, count, row in zip(
            places, drafted.counts.tolist(), found.tolist(), strict=True))  # fmt: skip
        return found

    monkeypatch.setattr(CpuDraftModel, "draft", draft)
    prompt = prompt_of(37)
    found, _, _ = counted(predicting.engine(draft=predicting.head, **drafting("mtp", 3)), [prompt], 12)
    tokens = prompt + found[0]
    assert found == [predicting.expected(tuple(prompt), 12)] and len(noted) > 8
    for place, drafts in noted:
        # Steps that were planned ahead draft behind an answer's end too.
        if place <= len(tokens):
            assert drafts == predicting.drafts(tokens[:place], len(drafts)), place


def test_a_layer_that_is_right_saves_steps(agreeing: HybridWithMtp) -> None:
    prompts = [prompt_of(length, length) for length in (40, 3, 21)]
    found, drafted, right = counted(agreeing.engine(draft=agreeing.head, **drafting("mtp")), prompts, 20)
    assert found == [agreeing.expected(tuple(prompt), 20) for prompt in prompts]
    assert drafted == right > 30
