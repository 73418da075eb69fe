"""Rows that are dealt out to ranks: every rank gets the tokens of whole logits, to the last one."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Sequence

import pytest
import torch
from benchmarks import rank_processes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import write_checkpoint
from tests.parallel import dealt_rows, test_sharded_models
from tests.parallel.rank_group import ranks
from tests.parallel.test_rank_processes import PROMPT, tokens_of_one
from tests.parallel.test_sharded_models import SCHEMES
from tests.support.engine_on_runner import EngineOnRunner, RunnerWorker, greedy, layout_of, worker_runner
from tests.support.examples import examples
from tests.support.model_builds import load_model
from tests.support.rank_threads import ThreadCollectives, ThreadGroup, on_ranks
from tests.worker.driver import Entry, admission, execute, id_bytes, step

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.parallel.row_dealer import RowDealer, RowShares
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_backend.weights.placement import ALONE, Shard
from headrace_model_folder import ModelFolder

DEALING_WORKER = (sys.executable, str(pathlib.Path(__file__).with_name("dealing_worker.py")))
needs_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA GPUs")
CPU = torch.device("cpu")


@given(num_rows=st.integers(0, 600), num_ranks=st.integers(2, 8))
def test_every_row_has_one_rank(num_rows: int, num_ranks: int) -> None:
    shares = RowShares(num_rows, num_ranks)
    rows = [shares.rows(rank) for rank in range(num_ranks)]
    assert [row for own in rows for row in range(own.start, own.stop)] == list(range(num_rows))
    assert shares.counts() == [own.stop - own.start for own in rows]
    assert max(shares.counts()) == shares.length
    # What lies behind a share's own rows, where shares of equal length stand in a line, lies behind
    # all rows.
    assert all(own.stop - own.start == shares.length for own in rows if own.stop < num_rows)
    # Where logits are received and where they are drawn from, in memory for all rows and one more.
    assert 2 * shares.length <= num_rows + 1


class Card(ThreadCollectives):
    """A rank that says it is a card's."""

    def __init__(self, world_size: int) -> None:
        super().__init__(ThreadGroup(world_size), 0)
        self.device = torch.device("cuda", 0)


LEAST = [(2, 128_256, 524), (4, 128_256, 234), (4, 32_000, 934)]


@pytest.mark.parametrize(("world_size", "vocab_size", "least"), LEAST)
def test_few_rows_of_cards_are_not_dealt_out(world_size: int, vocab_size: int, least: int) -> None:
    dealer = RowDealer(Card(world_size), vocab_size)
    paying = [num_rows for num_rows in range(1000) if dealer.pays(num_rows)]
    assert paying == list(range(least, 1000)), "with more rows it stays so"


def test_on_a_cpu_two_rows_are_dealt_out() -> None:
    dealer = RowDealer(ThreadCollectives(ThreadGroup(2), 0), 96)
    assert [dealer.pays(num_rows) for num_rows in range(4)] == [False, False, True, True]


def test_parts_with_logits_of_no_token_are_not_dealt_out() -> None:
    ranks = ThreadCollectives(ThreadGroup(2), 0)
    assert RowDealer.of(ranks, 96) is not None
    assert RowDealer.of(ranks, 97) is None and RowDealer.of(None, 96) is None


@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), world_size=st.sampled_from([2, 3, 4, 8]))
def test_mixtures_draw_as_from_whole_logits(seed: int, world_size: int) -> None:
    def body(shard: Shard) -> int:
        return dealt_rows.check(shard.together, seed).num_dealt

    assert len(set(on_ranks(world_size, body))) == 1, "ranks deal the same steps out"


def results(world_size: int, device: str, num_seeds: int) -> list[dict[str, int]]:
    arguments = ["--device", device, "--seeds", str(num_seeds)]
    return list(rank_processes.results("tests.parallel.dealt_rows", world_size, arguments))


# Other numbers of ranks, as threads, are above.
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_processes_draw_as_from_whole_logits(world_size: int) -> None:
    found = results(world_size, "cpu", 4)
    assert found[0]["dealt"] > 20 and found[0]["not_finite"] > 0


@pytest.mark.multi_gpu
@needs_cards
@pytest.mark.timeout(600)
def test_cards_draw_as_from_whole_logits() -> None:
    found = results(torch.cuda.device_count(), "cuda", 20)
    assert found[0]["dealt"] > 50 and found[0]["not_finite"] > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("dealt") / "llama"
    write_checkpoint(path, "llama-mha")
    return ModelFolder.open(path)


def load(folder: ModelFolder, shard: Shard = ALONE) -> CausalLM:
    return load_model(folder, folder.config, torch.float32, CPU, "folder", 0, lambda *_: None, shard=shard)


SETTINGS = {"max_num_batched_tokens": 24, "max_num_seqs": 6}
# Too few for all rows at once.
NUM_BLOCKS = 14
WANTED = (
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "seed": 2},
    {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "top_n_sigma": 2.0, "seed": 4},
    {"temperature": 0.7, "bad_words": ((11,), (12, 13)), "seed": 5},
    {"temperature": 1.0, "presence_penalty": 0.6, "seed": 6},
)


def preempting_plans(folder: ModelFolder) -> list[StepPlan]:
    """What an engine plans for rows of all kinds that press each other out."""
    engine = EngineOnRunner(load(folder), layout_of(folder.config), NUM_BLOCKS, poison=False, **SETTINGS)
    prompts = [[(17 * place + 5 * index) % 89 + 3 for index in range(20 + 6 * place)] for place in range(len(WANTED))]
    engine.outputs([greedy(prompt, 30, **wanted) for prompt, wanted in zip(prompts, WANTED, strict=True)])
    assert isinstance(engine.worker, RunnerWorker)
    plans = [StepPlan.decode(plan) for plan in engine.worker.computed]
    taken = sum(len(plan.admissions) for plan in plans)
    assert taken > len(WANTED), "nobody was preempted"
    return plans


def answers(plans: Sequence[StepPlan], folder: ModelFolder, shard: Shard = ALONE) -> list[list[int]]:
    """What one rank draws."""
    runner = worker_runner(load(folder, shard), layout_of(folder.config), NUM_BLOCKS, **SETTINGS)
    return [execute(runner, plan).tokens.tolist() for plan in plans]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_that_come_back_after_a_preemption_draw_as_from_whole_logits(
    folder: ModelFolder, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = preempting_plans(folder)
    dealt = []
    deal = RowDealer.deal

    def noted(dealer: RowDealer, part: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        dealt.append(len(part))
        return deal(dealer, part, room)

    monkeypatch.setattr(RowDealer, "deal", noted)
    found = on_ranks(world_size, functools.partial(answers, plans, folder))
    assert len(dealt) > 20 * world_size and any(count % world_size for count in dealt)
    num_dealt = len(dealt)
    monkeypatch.setattr(RowDealer, "pays", lambda dealer, num_rows: False)
    assert found == on_ranks(world_size, functools.partial(answers, plans, folder))
    assert len(dealt) == num_dealt
    assert found == [answers(plans, folder)] * world_size


# Of 8 bits, in both types; tied, with a limit of its logits.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), [("llama-mha", "int8"), ("llama-mha", "fp8"), ("gemma4", None)])
def test_output_layers_of_every_form_are_dealt_out(tmp_path: pathlib.Path, name: str, head: str | None) -> None:
    write_checkpoint(tmp_path / name, name)
    opened, options = ModelFolder.open(tmp_path / name), {"temperature": 1.0, "seed": 4}
    about = (opened, None, options)
    alone = test_sharded_models.run(*about, head=SCHEMES[head] if head else None)
    found = on_ranks(2, lambda shard: test_sharded_models.run(*about, shard, SCHEMES[head] if head else None))
    assert [rank.tokens for rank in found] == [alone.tokens] * 2


def mixed_plans() -> list[StepPlan]:
    """Five rows of all kinds, planned ahead; in some steps one reports log probabilities."""
    prompts = [PROMPT[: 5 + 4 * row] for row in range(5)]
    options = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0.7, "top_k": 9}]
    options.append({"temperature": 1.0, "repetition_penalty": 1.3, "prompt_ids": id_bytes(*prompts[4])})
    rows = [admission(row, **wanted) for row, wanted in enumerate(options)]
    tables = {row: [row * 4 + i for i in range(4)] for row in range(5)}
    plans = [step([Entry(row, 0, prompts[row], (row,)) for row in range(5)], rows, tables, step_id=1)]
    for i in range(1, 6):
        # In one step two rows, in another one: fewer than ranks.
        drawing = {2: (1, 3), 3: (4,)}.get(i, (0, 1, 2, 3, 4))
        lengths = [sum(1 for j in range(1, i) if row in {2: (1, 3), 3: (4,)}.get(j, range(5))) for row in range(5)]
        entries = [Entry(row, len(prompts[row]) + lengths[row], None, (row,), lengths[row] + 1) for row in drawing]
        plans.append(step(entries, step_id=i + 1))
    reporting = admission(5, temperature=0.9, num_logprobs=2)
    end = [Entry(row, len(prompts[row]) + 3 + (row in (1, 3)) + (row == 4), None, (row,), 9) for row in range(5)]
    plans.append(step([*end, Entry(5, 0, PROMPT, (5,))], [reporting], {5: [40, 41, 42]}, step_id=7))
    return plans


def drawn(found: Sequence[StepResult]) -> list[list[int]]:
    return [result.tokens.tolist() for result in found]


# As threads they do so above.
@pytest.mark.slow
@pytest.mark.parametrize("about", [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}], ids=str)
async def test_processes_answer_with_the_tokens_of_one(folder: ModelFolder, about: dict[str, int]) -> None:
    plans = mixed_plans()
    async with ranks(folder.path, **about) as group:
        await group.group.wait_ready()
        found = await group.answered(plans)
        assert await group.end() == [0] * len(group.processes)
    assert drawn(found) == tokens_of_one(folder.path, plans)
    assert found[-1].logprob_ranks.size == 1


# As threads experts are shared out in test_sharded_models.
@pytest.mark.slow
async def test_ranks_with_whole_experts_answer_with_the_tokens_of_one(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, "qwen3-moe-dense-layers")
    plans = mixed_plans()
    async with ranks(tmp_path, 2, expert_parallel=True) as group:
        await group.group.wait_ready()
        found = await group.answered(plans)
    assert drawn(found) == tokens_of_one(tmp_path, plans)


# Killed elsewhere in a step, in test_rank_processes.
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_killed_while_rows_are_dealt_out_is_named(folder: ModelFolder, victim: int) -> None:
    async with ranks(folder.path, 2, command=(*DEALING_WORKER, "--ends-in-deal", str(victim), "5")) as group:
        await group.group.wait_ready()
        assert group.group.send_plan(mixed_plans()[0].encode())
        assert str(await group.loss()).startswith(f"worker {victim} ended with signal 9, ")


@pytest.mark.multi_gpu
@needs_cards
# Two groups start, and each compiles its kernels where none are cached.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("graph_sizes", ["off", "1,2,4,8"])
async def test_two_cards_draw_the_tokens_of_whole_logits(folder: ModelFolder, graph_sizes: str) -> None:
    plans, tokens = mixed_plans(), []
    for options in ((), ("--never-deals",)):
        about = {"device": "cuda", "graph_sizes": graph_sizes}
        async with ranks(folder.path, 2, command=(*DEALING_WORKER, *options), **about) as group:
            await group.group.wait_ready()
            found = await group.answered(plans)
            tokens.append(drawn(found))
            assert not any(result.late_work for result in found)
    assert tokens[0] == tokens[1]
