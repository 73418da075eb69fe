"""A model with an EAGLE-3 head that drafts: the same answers, whatever is asked and happens."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
from tests.e2e import test_speculation
from tests.e2e.test_speculation import CRAMPED, FP32, SPECS, assert_same
from tests.support.eagle_heads import head_config, random_head, write_head
from tests.support.processes import wait_until
from tests.support.rpc import Transcript, connected, generate, idle_load
from tests.support.running_server import DEMO, RunningServer, refused, running_server

from headrace.v1 import inference_pb2

SOME = ("greedy", "several")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random head of a quarter of the demo's vocabulary."""
    config = head_config(json.loads((DEMO / "config.json").read_text()), 1024, (2, 4, 5))
    return write_head(tmp_path_factory.mktemp("heads") / "head", config, random_head(config, scale=0.05))


def flags(head: pathlib.Path) -> tuple[str, ...]:
    return ("--speculate", "eagle", "--draft-model", str(head), "--speculate-tokens", "2")


@pytest.fixture(scope="module", params=[(), pytest.param(("--tp", "2"), marks=pytest.mark.slow)], ids=["alone", "tp2"])
def drafting(request: pytest.FixtureRequest, head: pathlib.Path) -> Iterator[RunningServer]:
    with running_server(*FP32, *flags(head), *CRAMPED, *request.param) as server:
        yield server
        wait_until(lambda: idle_load(server.address), 60, "no request and no block left")


@pytest.fixture(scope="module")
def golden(shared_server: RunningServer) -> dict[str, Transcript]:
    """What a server without drafts answers; of others than these as they are asked for."""
    return {name: generate(shared_server.address, SPECS[name]) for name in SOME}


@pytest.fixture(scope="module")
def all_golden(shared_server: RunningServer) -> dict[str, Transcript]:
    return {name: generate(shared_server.address, each) for name, each in SPECS.items()}


@pytest.mark.slow  # test_eagle_drafts.py has a worker with a head; settings are refused every day.
def test_a_head_changes_no_answer(drafting: RunningServer, golden: dict[str, Transcript]) -> None:
    """Twice: the second time prompts are found in the prefix cache, with keys and states."""
    for _ in range(2):
        for name in SOME:
            found = generate(drafting.address, SPECS[name])
            assert_same(found, golden[name], name)
            assert found.done is not None and found.done.ledger.draft_tokens > 0


@pytest.mark.slow  # test_eagle_drafts.py has each option with a worker alone.
def test_each_option_answers_as_without_drafts(drafting: RunningServer, all_golden: dict[str, Transcript]) -> None:
    for name, each in SPECS.items():
        assert_same(generate(drafting.address, each), all_golden[name], name)


@pytest.mark.slow  # test_speculation.py has another drafter's preempted rows.
def test_preempted_rows_answer_as_without_drafts(drafting: RunningServer, all_golden: dict[str, Transcript]) -> None:
    test_speculation.test_preempted_rows_answer_as_without_drafts(drafting, all_golden)


@pytest.mark.slow  # test_speculation.py kills a worker that drafts otherwise.
def test_a_worker_that_is_killed_or_left_within_answers_loses_and_doubles_nothing(
    drafting: RunningServer, all_golden: dict[str, Transcript]
) -> None:
    test_speculation.test_a_worker_that_is_killed_within_answers_loses_and_doubles_nothing(drafting, all_golden)
    # Who leaves in the middle keeps no block and changes nobody's answer.
    with connected(drafting.address) as calls:
        left = calls.Generate(inference_pb2.GenerateRequest(spec=SPECS["several"]))
        next(iter(left))
        left.cancel()
    assert_same(generate(drafting.address, SPECS["several"]), all_golden["several"], "several")


def test_settings_that_make_no_pair_are_refused(head: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def said(*options: str) -> str:
        ended, _ = refused(*options)
        assert ended.returncode == 2
        return str(ended.stderr)

    assert "no draft_model is named: the folder of the model's EAGLE-3 head" in said("--speculate", "eagle")
    assert "draft_quantize is int8, and speculate is eagle" in said(*flags(head), "--draft-quantize", "int8")
    assert "that are served (nearest: LlamaForCausalLM," in said("--speculate", "draft", "--draft-model", str(head))
    of_a_model = said("--speculate", "eagle", "--draft-model", str(DEMO / "draft"))
    assert "architectures of an EAGLE-3 head name one of LlamaForCausalLMEagle3" in of_a_model
    assert "no such folder" in said("--speculate", "eagle", "--draft-model", str(tmp_path / "nowhere"))
