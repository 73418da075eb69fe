"""An engine whose ranks are on two hosts drafts as one of one host does, and answers the same."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator

import pytest
from tests.e2e.test_hosts import PROMPTS, WORKER, command
from tests.support.mtp_models import make_agreeing, write_mtp_model
from tests.support.ports import free_address
from tests.support.processes import wait_until
from tests.support.rpc import generate, greedy
from tests.support.running_server import DEMO, running_server

# Hosts that lack a draft model are refused in tests/backend/hosts, every day; drafts of ranks on
# one host are in test_draft_model and test_draft_heads.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FP32 = ("--dtype", "fp32")
TOKENS = 60


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


@contextlib.contextmanager
def engine_of_two_hosts(
    folder: pathlib.Path, model: pathlib.Path, drafts: tuple[str, ...], held: tuple[str, ...]
) -> Iterator[str]:
    """Runs backend, agent and service; gives the service's address once it serves."""
    engine, service = free_address(), free_address()
    secret = folder / "secret"
    secret.write_text("a secret of sixteen bytes or more")
    secret.chmod(0o600)
    shown = ("--engine-token-file", str(secret))
    ranks = ("--tp", "2", "--hosts", "2", "--num-blocks", "256", *FP32, *drafts, *held)
    backend = ("backend", str(model), "--listen", engine, "--token-file", str(secret), *WORKER, *ranks)
    with (
        command(folder / "backend.log", *backend),
        command(folder / "agent.log", "ranks", str(model), "--join", engine, *WORKER, *shown, *held),
        command(folder / "service.log", "service", "--listen", service, "--engine", engine, *shown),
    ):
        wait_until(lambda: " ready " in (folder / "backend.log").read_text(), 240, "workers that are ready")
        yield service


@pytest.mark.parametrize("drafter", ["ngram", "draft", "mtp"])
def test_drafts_over_hosts_change_no_answer_and_save_steps(
    drafter: str, glm: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    model = glm if drafter == "mtp" else DEMO
    held = ("--draft-model", str(DEMO / "draft")) if drafter == "draft" else ()
    prompts = [greedy([*prompt, *prompt], TOKENS) for prompt in PROMPTS]
    with running_server(*FP32, "--device", "cpu", "--model", str(model)) as plain:
        golden = [generate(plain.address, each).tokens for each in prompts]
    drafts = ("--speculate", drafter, "--speculate-tokens", "3")
    with engine_of_two_hosts(tmp_path, model, drafts, held) as address:
        found = [generate(address, each) for each in prompts]
    assert [each.tokens for each in found] == golden
    ledgers = [each.done.ledger for each in found if each.done is not None]
    assert sum(ledger.draft_tokens for ledger in ledgers) > 0
    if drafter != "ngram":
        assert sum(ledger.step_count for ledger in ledgers) < len(prompts) * TOKENS
