"""A model with an EAGLE-3 head that drafts: the same answers, whatever the head knows."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
from tests.e2e.test_draft_model import FP32, STORY, seen
from tests.support.eagle_heads import head_config, random_head, write_head
from tests.support.rpc import generate, greedy
from tests.support.running_server import DEMO, RunningServer, refused, running_server

from headrace.v1 import generation_pb2

TOKENS = 16


def specs() -> list[generation_pb2.GenerationSpec]:
    """Greedy, and two drawn outputs of one prompt, whose last block is copied."""
    drawn = greedy(STORY, TOKENS, n=2)
    drawn.sampling.temperature, drawn.sampling.seed = 0.8, 5
    return [greedy(STORY, TOKENS), drawn]


@pytest.fixture(scope="module")
def golden(shared_server: RunningServer) -> list[object]:
    """What a server without drafts answers."""
    return [seen(generate(shared_server.address, each)) for each in specs()]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random head of a quarter of the demo's vocabulary."""
    config = head_config(json.loads((DEMO / "config.json").read_text()), 1024, (2, 4, 5))
    return write_head(tmp_path_factory.mktemp("heads") / "head", config, random_head(config, scale=0.05))


def flags(head: pathlib.Path) -> tuple[str, ...]:
    return ("--speculate", "eagle", "--draft-model", str(head), "--speculate-tokens", "4")


@pytest.fixture(scope="module", params=[(), pytest.param(("--tp", "2"), marks=pytest.mark.slow)], ids=["alone", "tp2"])
def drafting(request: pytest.FixtureRequest, head: pathlib.Path) -> Iterator[RunningServer]:
    with running_server(*FP32, *flags(head), *request.param) as server:
        yield server


def test_a_head_changes_no_answer(drafting: RunningServer, golden: list[object]) -> None:
    """Twice: the second time prompts are found in the prefix cache, with keys and states."""
    for _ in range(2):
        found = [generate(drafting.address, each) for each in specs()]
        assert [seen(each) for each in found] == golden
        done = found[0].done
        assert done is not None and done.ledger.draft_tokens > TOKENS


def test_settings_that_make_no_pair_are_refused(head: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def said(*options: str) -> str:
        ended, _ = refused(*options)
        assert ended.returncode == 2
        return str(ended.stderr)

    assert "no draft_model is named: the folder of the model's EAGLE-3 head" in said("--speculate", "eagle")
    assert "draft_quantize is int8, and speculate is eagle" in said(*flags(head), "--draft-quantize", "int8")
    assert "must name one of LlamaForCausalLM" in said("--speculate", "draft", "--draft-model", str(head))
    of_a_model = said("--speculate", "eagle", "--draft-model", str(DEMO / "draft"))
    assert "architectures of an EAGLE-3 head name one of LlamaForCausalLMEagle3" in of_a_model
    assert "no such folder" in said("--speculate", "eagle", "--draft-model", str(tmp_path / "nowhere"))
