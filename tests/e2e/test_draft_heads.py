"""A model with a head that drafts: the same answers, whatever is asked and happens.

The head is an EAGLE-3 head of a folder of its own, or the layer behind the model's last one.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.e2e import test_speculation
from tests.e2e.test_speculation import CRAMPED, FP32, SPECS, assert_same
from tests.support.eagle_heads import head_config, random_head, write_head
from tests.support.mtp_models import make_agreeing, write_mtp_model
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


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A mixture of experts with the demo's tokenizer, whose layer behind the last one is right."""
    eos = json.loads((DEMO / "config.json").read_text())["eos_token_id"]
    sizes = {"vocab_size": 4096, "hidden_size": 64, "max_position_embeddings": 2048}
    path = write_mtp_model(tmp_path_factory.mktemp("models") / "glm", eos_token_id=eos, **sizes)
    make_agreeing(path)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


class Drafting(NamedTuple):
    """A server that drafts, and what one of the same model that does not draft answers."""

    server: RunningServer
    golden: dict[str, Transcript]


@pytest.fixture(
    scope="module",
    params=[("eagle",), ("eagle", "--tp", "2"), ("mtp",), ("mtp", "--tp", "2", "--expert-parallel")],
    ids=["eagle", "eagle-tp2", "mtp", "mtp-tp2"],
)
def drafting(
    request: pytest.FixtureRequest, head: pathlib.Path, glm: pathlib.Path, shared_server: RunningServer
) -> Iterator[Drafting]:
    kind, *ranks = request.param
    if kind == "eagle":
        golden = {name: generate(shared_server.address, each) for name, each in SPECS.items()}
        options = flags(head)
    else:
        model = ("--model", str(glm))
        with running_server(*FP32, *model) as plain:
            golden = {name: generate(plain.address, each) for name, each in SPECS.items()}
        options = (*model, "--speculate", "mtp", "--speculate-tokens", "2")
    with running_server(*FP32, *options, *CRAMPED, *ranks) as server:
        yield Drafting(server, golden)
        wait_until(lambda: idle_load(server.address), 60, "no request and no block left")


@pytest.mark.slow  # Workers with heads are tried every day; settings are refused every day.
def test_a_head_changes_no_answer(drafting: Drafting, request: pytest.FixtureRequest) -> None:
    """Twice: the second time prompts are found in the prefix cache, with keys and states."""
    for _ in range(2):
        for name in SOME:
            found = generate(drafting.server.address, SPECS[name])
            assert_same(found, drafting.golden[name], name)
            assert found.done is not None and found.done.ledger.draft_tokens > 0
            if "mtp" in request.node.name:
                assert found.done.ledger.accepted_tokens > found.done.ledger.draft_tokens // 2


@pytest.mark.slow  # test_eagle_drafts.py and test_mtp_drafts.py have each option with a worker alone.
def test_each_option_answers_as_without_drafts(drafting: Drafting) -> None:
    for name, each in SPECS.items():
        assert_same(generate(drafting.server.address, each), drafting.golden[name], name)


@pytest.mark.slow  # test_speculation.py has another drafter's preempted rows.
def test_preempted_rows_answer_as_without_drafts(drafting: Drafting) -> None:
    test_speculation.test_preempted_rows_answer_as_without_drafts(*drafting)


@pytest.mark.slow  # test_speculation.py kills a worker that drafts otherwise.
def test_a_worker_that_is_killed_or_left_within_answers_loses_and_doubles_nothing(drafting: Drafting) -> None:
    test_speculation.test_a_worker_that_is_killed_within_answers_loses_and_doubles_nothing(*drafting)
    # Who leaves in the middle keeps no block and changes nobody's answer.
    address = drafting.server.address
    with connected(address) as calls:
        left = calls.Generate(inference_pb2.GenerateRequest(spec=SPECS["several"]))
        next(iter(left))
        left.cancel()
    assert_same(generate(address, SPECS["several"]), drafting.golden["several"], "several")


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
    assert "the model (LlamaForCausalLM) has no MTP layer to draft with" in said("--speculate", "mtp")
    assert "draft_model is" in said("--speculate", "mtp", "--draft-model", str(head))
    assert "no such folder" in said("--speculate", "eagle", "--draft-model", str(tmp_path / "nowhere"))
