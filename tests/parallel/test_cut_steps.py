"""Steps of several ranks that are cut into two pieces.

The same tokens and, where products do not depend on the number of rows, the same bits; nothing
reads, overwrites or forgets what is still being added up.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable

import pytest
import torch
from benchmarks import rank_processes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import write_checkpoint
from tests.parallel.rank_group import ranks
from tests.parallel.test_rank_processes import PROMPT, plans, tokens_of_one
from tests.parallel.test_sharded_models import NAMES, NAMES_OF_WHOLE_STEPS, SCHEMES, load, run
from tests.support.rank_threads import ThreadCollectives, ThreadGroup, on_ranks
from tests.worker.driver import Entry, admission, make_runner, step

from headrace_backend.parallel.collectives import PendingAllReduce, PieceRule
from headrace_backend.parallel.nccl import piece_rule
from headrace_backend.parallel.symmetric import CAPACITY_BYTES
from headrace_backend.weights.placement import Shard
from headrace_model_folder import ModelFolder

CUTTING_WORKER = (sys.executable, str(pathlib.Path(__file__).with_name("cutting_worker.py")))
needs_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA GPUs")
EVERY_STEP = PieceRule(1, 1, 1)
HIDDEN_BYTES = 64 * 4


@given(num_tokens=st.integers(1, 20_000), multiple=st.sampled_from([1, 2, 128, 256]), least=st.integers(1, 20_000))
def test_pieces_are_halves_in_whole_tiles(num_tokens: int, multiple: int, least: int) -> None:
    rules = PieceRule(4 * least, 1, multiple), PieceRule(1, 4 * least, multiple)
    first, captured = (rule.first_piece(num_tokens, 4, rule is rules[1]) for rule in rules)
    assert captured == first
    if first is None:
        assert num_tokens < least or num_tokens <= multiple
        return
    assert num_tokens >= least and 0 < first < num_tokens and first % multiple == 0
    assert abs(2 * first - num_tokens) <= multiple


def test_only_steps_whose_pieces_nccl_takes_well_are_cut() -> None:
    # The width of a 70B model and of an 8B one, in bf16.
    of_two, of_four = piece_rule(2), piece_rule(4)
    assert [of_two.first_piece(num_tokens, 2 * 8192) for num_tokens in (4095, 4096, 8192)] == [None, 2048, 4096]
    assert [of_two.first_piece(num_tokens, 2 * 4096) for num_tokens in (8191, 8192, 16384)] == [None, 4096, 8192]
    # Ranks of four have half of the products of ranks of two, and as many launches.
    assert [of_four.first_piece(num_tokens, 2 * 8192) for num_tokens in (8191, 8192)] == [None, 4096]
    # What our kernels take whole is left to them.
    assert of_two.least_bytes > CAPACITY_BYTES


class LateAllReduce(PendingAllReduce):
    """A sum whose numbers come when it is waited for; before, there are none in its tensor."""

    def __init__(self, collectives: LateCollectives, partial: torch.Tensor) -> None:
        self._collectives, self._partial, self._own = collectives, partial, partial.clone()
        partial.fill_(float("nan"))

    def wait(self) -> torch.Tensor:
        """The sum, in the tensor."""
        assert self._partial.isnan().all(), "written before it was waited for"
        return self._partial.copy_(self._collectives.late_sum(self, self._own))


class LateCollectives(ThreadCollectives):
    """Collectives like a card's: what is begun is done as late as possible, in order."""

    @classmethod
    def of(cls, shard: Shard, rule: PieceRule | None = EVERY_STEP) -> LateCollectives:
        """A rank's, in place of its own."""
        assert isinstance(shard.collectives, ThreadCollectives)
        late = cls(shard.collectives._group, shard.rank)
        late.piece_rule = rule
        return late

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.pending: list[LateAllReduce] = []
        # Of all that were begun.
        self.begun_rows: list[int] = []

    def begin_all_reduce(self, partial: torch.Tensor) -> PendingAllReduce:
        self.pending.append(LateAllReduce(self, partial))
        self.begun_rows.append(len(partial))
        return self.pending[-1]

    def late_sum(self, pending: LateAllReduce, own: torch.Tensor) -> torch.Tensor:
        """Adds up all ranks' tensors."""
        assert self.pending.pop(0) is pending, "waited for out of turn"
        return super().all_reduce(own)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        assert not self.pending, "a sum in the middle of others"
        return super().all_reduce(partial)


@functools.cache
def _folder(base: pathlib.Path, name: str) -> ModelFolder:
    write_checkpoint(base / name, name)
    return ModelFolder.open(base / name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFolder]:
    return functools.partial(_folder, tmp_path_factory.mktemp("cut"))


def late(shard: Shard, rule: PieceRule | None = EVERY_STEP) -> tuple[Shard, LateCollectives]:
    collectives = LateCollectives.of(shard, rule)
    return Shard(shard.rank, shard.world_size, collectives), collectives


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_cut_their_steps_draw_the_tokens_of_one(
    folders: Callable[[str], ModelFolder], name: str, world_size: int
) -> None:
    folder = folders(name)

    def of_rank(shard: Shard) -> tuple[list[int], torch.Tensor]:
        cutting, collectives = late(shard)
        found = run(folder, None, {}, cutting)
        assert collectives.begun_rows and not collectives.pending
        return found.tokens, found.logits

    alone = run(folder, None, {})
    found = on_ranks(world_size, of_rank)
    for tokens, logits in found:
        assert tokens == alone.tokens
        # fp32, sums in another order.
        torch.testing.assert_close(logits, alone.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, found[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES_OF_WHOLE_STEPS)
def test_layers_with_other_norms_keep_their_steps_whole(folders: Callable[[str], ModelFolder], name: str) -> None:
    folder = folders(name)

    def first_piece(shard: Shard) -> int | None:
        return load(folder, late(shard)[0]).first_piece(100_000, is_captured=False)

    assert on_ranks(2, first_piece) == [None, None]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_of_few_bits_are_multiplied_by_pieces(folders: Callable[[str], ModelFolder], scheme: str) -> None:
    folder = folders("llama-wide-heads")
    whole = on_ranks(2, lambda shard: run(folder, SCHEMES[scheme], {}, shard).tokens)
    assert on_ranks(2, lambda shard: run(folder, SCHEMES[scheme], {}, late(shard)[0]).tokens) == whole


def hidden_states(folder: ModelFolder, rule: PieceRule | None, num_tokens: int) -> list[tuple[torch.Tensor, list[int]]]:
    """Hidden states of a prompt's tokens, and the rows of all begun all-reduces, by rank."""

    def of_rank(shard: Shard) -> tuple[torch.Tensor, list[int]]:
        cutting, collectives = late(shard, rule)
        model = load(folder, cutting)
        runner = make_runner(model, model.num_layers, model.num_kv_heads, model.head_dim)
        prompt = [17 * index % 89 + 3 for index in range(num_tokens)]
        last = (num_tokens + 15) // 16
        plan = step([Entry(0, 0, prompt, (0,))], [admission(0)], {0: list(range(last))})
        with torch.inference_mode():
            return runner.forward(plan), collectives.begun_rows

    return on_ranks(2, of_rank)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_tokens=st.integers(2, 40), multiple=st.sampled_from([1, 3, 8, 16]), threshold=st.integers(2, 40))
def test_a_cut_changes_nothing_but_how_products_and_attention_round(
    folders: Callable[[str], ModelFolder],
    num_tokens: int,
    multiple: int,
    threshold: int,
) -> None:
    folder = folders("llama-biases")
    rule = PieceRule(threshold * HIDDEN_BYTES, threshold * HIDDEN_BYTES, multiple)
    first = rule.first_piece(num_tokens, HIDDEN_BYTES)
    # Of three layers all but the last one's second half is cut, which has two sums of each piece.
    expected_rows = [] if first is None else [first, num_tokens - first] * 4
    whole = hidden_states(folder, None, num_tokens)
    cut = hidden_states(folder, rule, num_tokens)
    for (found, rows), (expected, no_rows) in zip(cut, whole, strict=True):
        assert rows == expected_rows and not no_rows
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_last_piece_of_one_token(folders: Callable[[str], ModelFolder]) -> None:
    folder, rule = folders("llama-mha"), PieceRule(1, 1, 16)
    cut, whole = hidden_states(folder, rule, 17), hidden_states(folder, None, 17)
    assert cut[0][1] == [16, 1] * 4
    for (found, _), (expected, _) in zip(cut, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_one_rank_cuts_nothing(folders: Callable[[str], ModelFolder]) -> None:
    model = load(folders("llama-mha"), Shard())
    assert model.first_piece(100_000, is_captured=True) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("ranks") / "llama"
    write_checkpoint(path, "llama-biases")
    return path


def wrong_numbers(world_size: int, device: str, rows: int, width: int) -> list[list[int]]:
    """How many each rank found in sums that were begun."""
    arguments = ["--device", device, "--rows", str(rows), "--width", str(width)]
    [found] = rank_processes.results("tests.parallel.begun_all_reduces", world_size, arguments)
    return found["wrong"]


# Those of ranks in threads are whole in the tests above.
@pytest.mark.slow
def test_begun_all_reduces_of_processes_are_whole() -> None:
    assert wrong_numbers(3, "cpu", 64, 32) == [[0]] * 3


@pytest.mark.multi_gpu
@needs_cards
@pytest.mark.parametrize("rows", [2048, 131])
def test_begun_all_reduces_on_cards_are_whole_whatever_their_memory_is_used_for_next(rows: int) -> None:
    num_cards = torch.cuda.device_count()
    assert wrong_numbers(num_cards, "cuda", rows, 8192) == [[0]] * num_cards


@pytest.mark.multi_gpu
@needs_cards
@pytest.mark.timeout(560)
@pytest.mark.parametrize("graph_sizes", ["off", "auto"])
async def test_two_cards_that_cut_their_steps_draw_the_tokens_of_one(tmp_path: pathlib.Path, graph_sizes: str) -> None:
    write_checkpoint(tmp_path / "llama", "llama-wide")
    steps = [step([Entry(0, 0, PROMPT, (0,))], [admission(0)], {0: list(range(16))})]
    steps += [step([Entry(0, len(PROMPT) + i, None, (0,), i + 1)], step_id=i + 2) for i in range(8)]
    tokens = []
    for tp in (1, 2):
        settings = {"device": "cuda", "graph_sizes": graph_sizes, "num_blocks": 64}
        async with ranks(tmp_path / "llama", tp, command=CUTTING_WORKER, **settings) as group:
            await group.group.wait_ready()
            found = await group.answered(steps)
            tokens.append([result.tokens.tolist() for result in found])
            assert not any(result.late_work for result in found)
    assert tokens[0] == tokens[1]


# What four ranks cut is in test_ranks_that_cut_their_steps_draw_the_tokens_of_one, four processes
# are in test_rank_processes.
# Ranks in threads do in the tests above.
@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
async def test_processes_that_cut_their_steps_draw_the_tokens_of_one(model: pathlib.Path, tp: int) -> None:
    async with ranks(model, tp, command=CUTTING_WORKER) as group:
        await group.group.wait_ready()
        steps = plans(6)
        found = await group.answered(steps)
        assert await group.end() == [0] * tp
    assert [result.tokens.tolist() for result in found] == tokens_of_one(model, steps)


# Killed in any other, in test_rank_processes.
@pytest.mark.slow
async def test_a_rank_killed_in_a_begun_all_reduce_is_named(model: pathlib.Path) -> None:
    # The first piece of a prompt of 30.
    async with ranks(model, 2, command=(*CUTTING_WORKER, "--ends-in-sum", "1", "16")) as group:
        await group.group.wait_ready()
        assert group.group.send_plan(plans(1)[0].encode())
        assert str(await group.loss()).startswith("worker 1 ended with signal 9, ")
