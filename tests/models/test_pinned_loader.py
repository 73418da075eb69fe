"""The way of weights to a GPU, with a stand-in for the card that puts copies off as long as it may.

Buffers are not read into too early, values land exactly, faults are named.
"""

from __future__ import annotations

import math
import os
import pathlib
import threading
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import ignore_progress, write_checkpoint
from tests.models.test_loading import damage
from tests.support.examples import examples

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.weights.checkpoint_files import ByteCounter, CheckpointFiles
from headrace_backend.weights.dummy import fill_with_noise
from headrace_backend.weights.loader import load_weights, pinned_bytes
from headrace_backend.weights.pinned_loader import CudaTransfer, load_through_buffers
from headrace_backend.weights.placement import Placement, Shard, WeightTarget
from headrace_model_folder import InvalidModelFolder, ModelFolder, expected_tensors
from headrace_model_folder.tensor_index import read_tensor_index

CPU = torch.device("cpu")


class LazyEvent:
    def __init__(self, transfer: LateTransfer, number: int) -> None:
        self._transfer, self._number = transfer, number

    def synchronize(self) -> None:
        self._transfer.do_until(self._number)


class LateTransfer:
    """Copies as late as allowed.

    When an event behind them is waited for, in order, as a stream would.
    """

    device = CPU

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self.buffer_bytes: list[int] = []
        # Threads that may use it: who made it, and those that began.
        self._users = {threading.get_ident()}

    def begin_thread(self) -> None:
        self._users.add(threading.get_ident())

    def buffer(self, num_bytes: int) -> torch.Tensor:
        self.buffer_bytes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def submit(self, work: Callable[[], object]) -> LazyEvent:
        assert threading.get_ident() in self._users
        with self._lock:
            self._work.append(work)
            return LazyEvent(self, len(self._work))

    def do_until(self, number: int) -> None:
        assert threading.get_ident() in self._users
        with self._lock, torch.inference_mode():
            for work in self._work[self._done : number]:
                work()
            self._done = max(self._done, number)

    def finish(self) -> None:
        self.do_until(len(self._work))


def targets_of(
    folder: ModelFolder, dtype: torch.dtype, shard: Shard, device: torch.device = CPU
) -> dict[str, WeightTarget]:
    model = CausalLM(folder.config.description, Placement(dtype, device, shard), 16)
    return model.weight_targets()


def load_late(path: pathlib.Path, targets: dict[str, WeightTarget], piece_bytes: int, num_readers: int) -> LateTransfer:
    folder, transfer = ModelFolder.open(path), LateTransfer()
    files = CheckpointFiles(folder.weights_folder)
    counter = ByteCounter(sum(record.num_bytes for record in folder.tensors.values()), ignore_progress)
    try:
        load_through_buffers(files, folder.tensors, targets, counter, transfer, piece_bytes, num_readers)
    finally:
        files.close()
    return transfer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, "qwen3-tied-bias", max_shard_size="40KB")
    return path


@settings(
    max_examples=examples(18, least=6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    piece_bytes=st.sampled_from([1, 100, 1000, 4096, 1 << 20]),
    num_readers=st.integers(1, 5),
    world=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_values_are_those_of_the_other_way(
    checkpoint: pathlib.Path, piece_bytes: int, num_readers: int, world: int, dtype: torch.dtype
) -> None:
    folder = ModelFolder.open(checkpoint)
    for rank in range(world):
        late, direct = (targets_of(folder, dtype, Shard(rank, world)) for _ in range(2))
        for target in late.values():
            target.tensor.fill_(math.nan)
        transfer = load_late(checkpoint, late, piece_bytes, num_readers)
        load_weights(folder, direct, ignore_progress)
        assert all(torch.equal(late[name].tensor, direct[name].tensor) for name in direct)
        assert len(transfer.buffer_bytes) == 2 * num_readers
        longest_row = 4 * 80
        assert max(transfer.buffer_bytes) <= max(piece_bytes, longest_row)


class Steps(ByteCounter):
    """What is added, one by one."""

    def __init__(self) -> None:
        super().__init__(1, ignore_progress)
        self.added: list[int] = []

    def add(self, num_bytes: int) -> None:
        self.added.append(num_bytes)


@pytest.mark.parametrize("rank", [0, 1])
def test_progress_goes_to_the_checkpoints_total_in_even_steps_for_a_rank_too(
    checkpoint: pathlib.Path, rank: int
) -> None:
    folder, counter = ModelFolder.open(checkpoint), Steps()
    files = CheckpointFiles(folder.weights_folder)
    targets = targets_of(folder, torch.float32, Shard(rank, 2))
    load_through_buffers(files, folder.tensors, targets, counter, LateTransfer(), 1000, 3)
    files.close()
    assert sum(counter.added) == sum(folder.tensors[name].num_bytes for name in targets)
    # A piece, and as much of the other rank's.
    assert 0 < min(counter.added) and max(counter.added) <= 2 * 1000


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named_with_its_file(tmp_path: pathlib.Path, value: float) -> None:
    write_checkpoint(tmp_path, "qwen3-tied-bias", max_shard_size="40KB")
    name = "model.layers.1.mlp.up_proj.weight"
    file = damage(tmp_path, name, value)
    targets = targets_of(ModelFolder.open(tmp_path), torch.float32, Shard())
    with pytest.raises(InvalidModelFolder, match=rf"{file}: tensor '{name}' holds a value that is not finite"):
        load_late(tmp_path, targets, 500, 3)


def test_a_truncated_file_ends_all_readers_and_is_named(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, "qwen3-tied-bias", max_shard_size="40KB")
    folder = ModelFolder.open(tmp_path)
    name, record = max(folder.tensors.items(), key=lambda item: item[1].offset)
    targets = targets_of(folder, torch.float32, Shard())
    os.truncate(tmp_path / record.file, record.offset + record.num_bytes - 1)
    files, counter = CheckpointFiles(folder.path), ByteCounter(1, ignore_progress)
    with pytest.raises(InvalidModelFolder, match=rf"{record.file}: is truncated: tensor '{name}'"):
        load_through_buffers(files, folder.tensors, targets, counter, LateTransfer(), 300, 3)
    files.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def test_the_pinned_memory_that_is_stated_is_that_of_the_buffers() -> None:
    assert pinned_bytes(CPU) == 0
    assert pinned_bytes(torch.device("cuda", 0)) == 256 << 20


on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_card_gets_the_values_of_a_cpu(checkpoint: pathlib.Path, world: int, dtype: torch.dtype) -> None:
    folder, card = ModelFolder.open(checkpoint), torch.device("cuda", 0)
    for rank in range(world):
        on_card, on_cpu = (targets_of(folder, dtype, Shard(rank, world), device) for device in (card, CPU))
        load_weights(folder, on_card, ignore_progress)
        load_weights(folder, on_cpu, ignore_progress)
        assert all(torch.equal(on_card[name].tensor.cpu(), on_cpu[name].tensor) for name in on_cpu)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_card_refuses_what_is_not_finite(tmp_path: pathlib.Path, value: float) -> None:
    write_checkpoint(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    damage(tmp_path, name, value)
    folder = ModelFolder.open(tmp_path)
    with pytest.raises(InvalidModelFolder, match=name):
        load_weights(folder, targets_of(folder, torch.bfloat16, Shard(), torch.device("cuda", 0)), ignore_progress)


@pytest.mark.gpu
@on_a_card
def test_a_gibibyte_in_many_pieces_arrives_whole_and_unpins_its_buffers(tmp_path: pathlib.Path) -> None:
    """Large enough that every buffer is used several times, while copies are under way."""
    generator = torch.Generator().manual_seed(0)
    stored = {f"t{i}": torch.randn(8192, 8192, generator=generator).bfloat16() for i in range(8)}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    records = read_tensor_index(tmp_path).tensors
    card = torch.device("cuda", 0)
    targets = {
        name: WeightTarget.of(torch.empty(8192, 8192, dtype=torch.bfloat16, device=card), range(8192), range(8192))
        for name in stored
    }
    files, transfer = CheckpointFiles(tmp_path), CudaTransfer(card)
    load_through_buffers(files, records, targets, ByteCounter(1, ignore_progress), transfer)
    files.close()
    transfer.give_back_buffers()
    assert all(torch.equal(targets[name].tensor.cpu(), stored[name]) for name in stored)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] < 256 << 20


@pytest.mark.gpu
@on_a_card
def test_dummy_weights_of_a_card_depend_on_seed_and_name_alone(checkpoint: pathlib.Path) -> None:
    folder, card = ModelFolder.open(checkpoint), torch.device("cuda", 0)
    shapes = expected_tensors(folder.config)

    def dummy(seed: int, shard: Shard, backwards: bool = False) -> dict[str, torch.Tensor]:
        targets = targets_of(folder, torch.bfloat16, shard, card)
        names = sorted(targets, reverse=backwards)
        fill_with_noise({name: targets[name] for name in names}, shapes, seed, ignore_progress)
        return {name: target.tensor for name, target in targets.items()}

    whole, again, other = dummy(3, Shard()), dummy(3, Shard(), backwards=True), dummy(4, Shard())
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    name = "model.layers.1.mlp.gate_proj.weight"
    assert not torch.equal(whole[name], other[name])
    assert not torch.equal(whole[name], whole["model.layers.2.mlp.gate_proj.weight"])
    assert abs(whole[name].float().std().item() - 0.02) < 0.002
    parts = [dummy(3, Shard(rank, 2))[name] for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole[name])
