"""A model with a smaller one beside it that drafts: the same answers, in fewer steps."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from tests.support.rpc import Transcript, generate, greedy
from tests.support.running_server import DEMO, RunningServer, refused, running_server

from headrace.v1 import generation_pb2

FP32 = ("--dtype", "fp32", "--device", "cpu")
DRAFT = ("--speculate", "draft", "--draft-model", str(DEMO / "draft"), "--speculate-tokens", "4")
STORY = "Once upon a time there was a little"
TOKENS = 60


def specs() -> list[generation_pb2.GenerationSpec]:
    """Greedy, drawn, and several outputs of one prompt, whose last block is copied."""
    drawn = greedy(STORY, TOKENS, n=2)
    drawn.sampling.temperature, drawn.sampling.seed = 0.8, 5
    penalized = greedy(STORY, TOKENS)
    penalized.sampling.frequency_penalty = 0.4
    return [greedy(STORY, TOKENS), drawn, penalized]


def seen(transcript: Transcript) -> object:
    return transcript.tokens, transcript.texts


@pytest.fixture(scope="module")
def golden(shared_server: RunningServer) -> list[object]:
    """What a server without drafts answers."""
    return [seen(generate(shared_server.address, each)) for each in specs()]


@pytest.fixture(scope="module")
def drafting() -> Iterator[RunningServer]:
    with running_server(*FP32, *DRAFT) as server:
        yield server


# Drafts of a model are taken and refused in tests/worker/speculation/test_draft_model, and by a
# whole server in test_speculation.
@pytest.mark.slow
def test_a_draft_model_changes_no_answer_and_saves_steps(drafting: RunningServer, golden: list[object]) -> None:
    """Twice: the second time prompts are found in the prefix cache, with the draft model's keys."""
    for _ in range(2):
        found = [generate(drafting.address, each) for each in specs()]
        assert [seen(each) for each in found] == golden
        done = found[0].done
        assert done is not None
        ledger = done.ledger
        assert ledger.accepted_tokens > ledger.draft_tokens // 2 and ledger.step_count < TOKENS // 2


@pytest.mark.slow
def test_an_answer_that_was_given_before_is_drafted_from_memory(golden: list[object]) -> None:
    """`tests/worker/speculation/test_suffix_drafter.py` has the drafter alone."""
    with running_server(*FP32, "--speculate", "suffix", "--speculate-tokens", "4") as server:
        first, second = (generate(server.address, greedy(STORY, TOKENS)) for _ in range(2))
    assert seen(first) == seen(second) == golden[0]
    assert first.done is not None and second.done is not None
    assert second.done.ledger.step_count < TOKENS // 3 < first.done.ledger.step_count


def test_settings_that_make_no_pair_are_refused(tmp_path: pathlib.Path) -> None:
    def said(*options: str) -> str:
        ended, _ = refused(*options)
        assert ended.returncode == 2
        return str(ended.stderr)

    assert "no draft_model is named" in said("--speculate", "draft")
    assert "a draft model is for speculate draft" in said("--draft-model", str(DEMO / "draft"))
    assert "speculate_tokens is 4, and speculate is off: nobody drafts" in said("--speculate-tokens", "4")
    assert "state_checkpoints is 4, and the model (LlamaForCausalLM) has no recurrent" in said(
        "--state-checkpoints", "4"
    )
    assert "nowhere: no such model folder" in said("--speculate", "draft", "--draft-model", str(tmp_path / "nowhere"))
