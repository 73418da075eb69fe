"""The arithmetic of memory, and which configurations are refused before anything is allocated."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import msgspec
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models.checkpoints import CONFIGS, make_model
from tests.support.demo_config import demo_config

from headrace_backend.config import EngineConfig
from headrace_backend.layers.rotary import RotaryTable
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.load import WeightMemory, weight_memory
from headrace_backend.server.workers.start_report import StartReport
from headrace_backend.tp_rules import rank_part
from headrace_backend.weights.placement import Shard
from headrace_backend.worker.errors import DoesNotFit, StartRefused
from headrace_backend.worker.start_up.device import choose_device, choose_dtype
from headrace_backend.worker.start_up.memory_plan import (
    DraftSizes,
    ModelMemory,
    Room,
    free_memory_bytes,
    measured_memory,
    model_memory,
    plan_estimate,
    plan_memory,
)
from headrace_backend.worker.start_up.profile_step import Profile
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.start import checked_max_model_len
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, cache_bytes, kv_type
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
MIB = 1 << 20
GIB = 1 << 30
MEMORY = ModelMemory(weights=100 * MIB, activations=50 * MIB, kv_block=MIB)


def config_of(path: pathlib.Path = pathlib.Path("model"), **values: object) -> EngineConfig:
    return EngineConfig.model_validate({"model": path, **values})


def sizes_of(max_model_len: int = 16, **values: object) -> WorkerSizes:
    return WorkerSizes.of(config_of(**values), max_model_len)


def test_a_cpu_cache_gets_a_quarter_of_what_is_free_and_at_most_four_gib() -> None:
    assert plan_memory(sizes_of(), MEMORY, Room(CPU, 2 * GIB)).num_blocks == 512
    assert plan_memory(sizes_of(), MEMORY, Room(CPU, 64 * GIB)).num_blocks == 4096


def test_a_gpu_cache_gets_what_the_model_leaves() -> None:
    plan = plan_memory(sizes_of(), MEMORY, Room(GPU, 10 * GIB, 11 * GIB))
    assert plan.reserve_bytes == 256 * MIB
    assert plan.num_blocks == (10 * GIB - 256 * MIB - 150 * MIB) // MIB
    large = plan_memory(sizes_of(), MEMORY, Room(GPU, 130 * GIB, 140 * GIB))
    assert large.reserve_bytes == int(0.0075 * 140 * GIB)


def test_noted_tokens_of_a_draft_model_are_counted_once_and_on_gpus_alone() -> None:
    model = demo_config().description
    weights = WeightMemory(MIB, 0)
    draft, sizes = DraftSizes(model, weights), sizes_of(4096, max_num_seqs=8, speculate="draft", draft_model="draft")
    for on_gpu, noted in ((True, 8 * 2048 * 4), (False, 0)):
        alone = model_memory(model, sizes, weights, torch.float32, on_gpu)
        both = model_memory(model, sizes, weights, torch.float32, on_gpu, draft)
        assert both.activations == 2 * alone.activations + noted
    eagle = dataclasses.replace(sizes, speculate="eagle")
    assert model_memory(model, eagle, weights, torch.float32, True, draft).activations == 2 * alone.activations


def test_graphs_in_which_a_draft_model_follows_steps_are_counted() -> None:
    """They have activations of their own, beside the larger of both models' other graphs."""
    model = demo_config().description
    draft, sizes = DraftSizes(model, WeightMemory(MIB, 0)), sizes_of(4096, speculate="draft", draft_model="draft")
    assert len(sizes.followed_graphs) == 5 and sizes.followed_graphs[-1] == 1024
    without = [dataclasses.replace(sizes, batch_graphs=()), dataclasses.replace(sizes, speculate="eagle")]
    assert [each.followed_graphs for each in without] == [(), ()]
    for each, on_gpu in ((sizes, True), (sizes, False), (without[0], True), (without[1], True)):
        alone = model_memory(model, each, draft.weights, torch.float32, on_gpu)
        both = model_memory(model, each, draft.weights, torch.float32, on_gpu, draft)
        added = 1024 * alone.graph_token + 5 * 10 * MIB if each is sizes and on_gpu else 0
        assert both.graphs == alone.graphs + added


def test_configured_sizes_hold_whatever_is_free() -> None:
    by_bytes = plan_memory(sizes_of(10**6, kv_memory=10 * MIB + 5), MEMORY, Room(CPU, GIB))
    assert (by_bytes.num_blocks, by_bytes.kv_cache_bytes) == (10, 10 * MIB)
    assert plan_memory(sizes_of(10**6, kv_memory=MIB, num_blocks=3), MEMORY, Room(CPU, GIB)).num_blocks == 3


@pytest.mark.parametrize(
    ("values", "max_model_len", "free", "message"),
    [
        (
            {},
            16 * 600,
            GIB,
            r"600 blocks of 16 tokens.*= 750.0 MiB; 1,024.0 MiB are free on cpu.*a quarter.*; max_model_len of at most "
            r"4096 fits",
        ),
        (
            {"num_blocks": 1000},
            16,
            GIB,
            r"= 1,150.0 MiB; 1,024.0 MiB are free on cpu, num_blocks is 1000; num_blocks of at most 874 fits",
        ),
        (
            {"kv_memory": "2GiB"},
            16,
            GIB,
            r"kv_memory is 2147483648; kv_memory from 1048576 \(one block\) to 916455424 fits",
        ),
        ({"kv_memory": 5}, 16, GIB, r"kv_memory is 5"),
        ({}, 16, 100 * MIB, r"weights 100.0 MiB \+ activations 50.0 MiB"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    values: dict[str, object], max_model_len: int, free: int, message: str
) -> None:
    with pytest.raises(StartRefused, match=message):
        plan_memory(sizes_of(max_model_len, **values), MEMORY, Room(CPU, free))


@given(
    free=st.integers(0, 300 * GIB),
    weights=st.integers(0, 150 * GIB),
    activations=st.integers(0, 20 * GIB),
    graphs=st.integers(0, GIB),
    kv_block=st.integers(1, 64 * MIB),
    max_model_len=st.integers(1, 1 << 20),
    on_gpu=st.booleans(),
    budget=st.just(0) | st.integers(1, 300 * GIB),
    values=st.sampled_from([{}, {"num_blocks": 1000}, {"kv_memory": "20GiB"}, {"kv_memory": 1}]),
)
def test_a_plan_fits_and_a_refusal_names_a_value_that_does(
    free: int,
    weights: int,
    activations: int,
    graphs: int,
    kv_block: int,
    max_model_len: int,
    on_gpu: bool,
    budget: int,
    values: dict[str, object],
) -> None:
    memory = ModelMemory(weights, activations, kv_block, graphs)
    room = Room(GPU if on_gpu else CPU, free, free + GIB if on_gpu else 0, budget)
    try:
        plan = plan_memory(sizes_of(max_model_len, **values), memory, room)
    except StartRefused as refused:
        found = re.search(
            r"; (num_blocks of at most|kv_memory from \d+ \(one block\) to|max_model_len of at most) (\d+) fits",
            str(refused),
        )
        if found is None:
            return
        name, nearest = found[1].split()[0], int(found[2])
        if name == "max_model_len":
            max_model_len = nearest
        else:
            values = {name: nearest}
        plan = plan_memory(sizes_of(max_model_len, **values), memory, room)
        if name == "kv_memory":
            assert plan_memory(sizes_of(max_model_len, kv_memory=kv_block), memory, room).num_blocks == 1
    taken = plan.weight_bytes + plan.activation_bytes + plan.graph_bytes + plan.reserve_bytes + plan.kv_cache_bytes
    assert taken <= plan.total_bytes == min(free, budget or free) and plan.num_blocks >= 1
    assert plan.kv_cache_bytes == plan.num_blocks * kv_block
    if not values:
        assert plan.num_blocks * 16 >= max_model_len
        # On a GPU less than a block is left over.
        assert not on_gpu or plan.total_bytes - taken < kv_block


def test_a_budget_takes_the_place_of_what_is_free() -> None:
    on_gpu = plan_memory(sizes_of(), MEMORY, Room(GPU, 70 * GIB, 80 * GIB, 20 * GIB))
    assert on_gpu.total_bytes == 20 * GIB
    assert on_gpu.num_blocks == (20 * GIB - int(0.0075 * 80 * GIB) - 150 * MIB) // MIB
    # On a CPU too the cache gets the rest of it: nothing is left for others to take.
    assert plan_memory(sizes_of(), MEMORY, Room(CPU, 64 * GIB, 0, GIB)).num_blocks == 1024 - 150
    assert plan_memory(sizes_of(), MEMORY, Room(CPU, 2 * GIB, 0, 20 * GIB)).total_bytes == 2 * GIB


def test_what_a_budget_cannot_hold_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        DoesNotFit, match=r"= 151\.0 MiB; memory_budget is 125829120 \(120\.0 MiB\), 1,024\.0 MiB are free"
    ):
        plan_memory(sizes_of(), MEMORY, Room(CPU, GIB, 0, 120 * MIB))


def test_ranks_on_a_cpu_share_the_budget_that_a_refusal_states() -> None:
    sizes = sizes_of(device="cpu", tp=4, memory_budget=480 * MIB)
    room = Room.of_rank(CPU, 64 * GIB, 0, 480 * MIB, 4)
    assert room.usable_bytes == 120 * MIB
    said = (
        r"memory_budget is 503316480 \(480\.0 MiB\), 65,536\.0 MiB are free on cpu, of which each of 4 ranks gets its "
        r"share"
    )
    with pytest.raises(DoesNotFit, match=rf"= 151\.0 MiB; {said}, and the cache"):
        plan_memory(sizes, MEMORY, room)
    # Less than a byte for each is not the same as no budget.
    with pytest.raises(DoesNotFit, match=r"memory_budget is 3 \("):
        plan_memory(sizes, MEMORY, room._replace(budget_bytes=3))
    on_cards = Room.of_rank(GPU, 70 * GIB, 80 * GIB, 20 * GIB, 4)
    assert (on_cards.usable_bytes, on_cards.sharers) == (20 * GIB, 1)
    # Without a budget each has a share of what is free, and of that a quarter for the cache.
    alone = Room.of_rank(CPU, 8 * GIB, 0, 0, 4)
    assert plan_memory(sizes_of(), MEMORY, alone).num_blocks == 512


def test_what_the_driver_takes_is_measured_on_the_card_not_on_the_budget() -> None:
    estimate = ModelMemory(weights=14 * GIB, activations=9 * GIB, kv_block=MIB, graphs=GIB)
    profile = Profile(weights=15 * GIB, activations=2 * GIB, free=60 * GIB)
    assert measured_memory(estimate, profile, Room(GPU, 79 * GIB, 80 * GIB, 30 * GIB)).other == 4 * GIB


def test_where_no_cache_fits_smaller_steps_are_named_if_they_leave_room_for_one(llama_path: pathlib.Path) -> None:
    folder = ModelFolder.open(llama_path)

    def estimate(free: int, **values: object) -> ModelMemory:
        sizes = sizes_of(256, max_num_seqs=512, max_num_batched_tokens=8192, **values)
        return plan_estimate(
            sizes, folder.config.description, WeightMemory(2 * folder.parameter_count), torch.bfloat16, Room(GPU, free)
        )[0]

    estimated = estimate(10 * GIB)
    assert estimated.graphs > 300 * MIB and estimate(10 * GIB, graph_sizes="off").graphs == 0
    # No graph holds logits, whatever the number of ranks that gather them.
    assert estimate(10 * GIB, tp=2).graphs == estimated.graphs
    # The reserve and some: enough for the weights, not for the activations of such steps.
    with pytest.raises(
        StartRefused, match=r"max_num_batched_tokens (\d+) with max_num_seqs (\d+) leaves room"
    ) as refused:
        estimate(256 * MIB + 2 * MIB + estimated.weights, graph_sizes="off")
    smaller = re.search(r"max_num_batched_tokens (\d+) with max_num_seqs (\d+)", str(refused.value))
    assert smaller
    sizes = sizes_of(max_num_batched_tokens=smaller[1], max_num_seqs=smaller[2], graph_sizes="off", max_model_len=16)
    room = Room(GPU, 256 * MIB + 2 * MIB + estimated.weights)
    assert (
        plan_estimate(sizes, folder.config.description, WeightMemory(2 * folder.parameter_count), torch.bfloat16, room)[
            1
        ].num_blocks
        >= 1
    )
    with pytest.raises(StartRefused, match="weights and rotary tables .* leave no room"):
        estimate(256 * MIB)


def test_what_was_measured_takes_the_place_of_estimates() -> None:
    estimate = ModelMemory(weights=14 * GIB, activations=9 * GIB, kv_block=MIB, graphs=GIB)
    profile = Profile(weights=15 * GIB, activations=2 * GIB, free=60 * GIB)
    measured = measured_memory(estimate, profile, Room(GPU, 79 * GIB, 80 * GIB))
    assert (measured.weights, measured.activations, measured.graphs) == (15 * GIB, 2 * GIB, GIB)
    # 79 GiB were free; 60 are left beside the weights' 15.
    assert measured.other == 4 * GIB and measured.is_measured


def test_a_gpus_plans_have_every_field_and_are_reported(llama_path: pathlib.Path) -> None:
    folder, room = ModelFolder.open(llama_path), Room(GPU, 79 * GIB, 80 * GIB)
    estimate, estimated = plan_estimate(
        sizes_of(256), folder.config.description, WeightMemory(GIB), torch.bfloat16, room
    )
    profile = Profile(weights=2 * GIB, activations=2 * GIB, free=70 * GIB)
    measured = plan_memory(sizes_of(256), measured_memory(estimate, profile, room), room)
    unknown = {"pinned_host_bytes", "stream_bytes", "state_bytes", "checkpoint_bytes"}
    for plan, missing in ((estimated, {"other_bytes"} | unknown), (measured, unknown)):
        sizes = {name: size for name, size in msgspec.structs.asdict(plan).items() if name.endswith("_bytes")}
        assert {name for name, size in sizes.items() if not size} == missing
        with structlog.testing.capture_logs() as lines:
            StartReport(0, shows_bars=False).on_memory_plan(
                msgspec.structs.replace(
                    plan, pinned_host_bytes=MIB, stream_bytes=MIB, state_bytes=MIB, checkpoint_bytes=MIB
                )
            )
        [line] = lines
        assert (line["device"], line["device_memory"]) == ("cuda:0", "80.0 GiB")
        assert {line[name] for name in ("pinned_host", "stream", "state", "state_checkpoint")} == {"1.0 MiB"}
        assert {name.removesuffix("_bytes") for name, size in sizes.items() if size} - {"device"} <= line.keys()


def test_kept_states_get_a_share_of_what_weights_and_steps_leave_or_their_number() -> None:
    """An eighth at most, no more than there are rows, and never what the least cache needs."""
    memory = ModelMemory(weights=10 * GIB, activations=0, kv_block=MIB, states=2 * GIB, checkpoint=50 * MIB)
    room = Room(GPU, 30 * GIB, 30 * GIB)
    left = room.usable_bytes - room.reserve_bytes - 12 * GIB
    few, many = (plan_memory(sizes_of(max_num_seqs=rows), memory, room) for rows in (8, 512))
    assert (few.num_checkpoints, few.checkpoint_bytes) == (8, 400 * MIB)
    assert many.num_checkpoints == left // 8 // (50 * MIB)
    assert many.kv_cache_bytes == (left - many.checkpoint_bytes) // MIB * MIB
    least = sizes_of(max_num_seqs=512).sequence_blocks.most_blocks(sizes_of().max_model_len)
    tight = Room(GPU, 12 * GIB + room.reserve_bytes + least * MIB + 49 * MIB, 30 * GIB)
    assert plan_memory(sizes_of(max_num_seqs=512), memory, tight).num_checkpoints == 0
    for settings, count in (({"state_checkpoints": 3}, 3), ({"enable_prefix_cache": False}, 0)):
        assert plan_memory(sizes_of(**settings), memory, room).num_checkpoints == count
    with pytest.raises(DoesNotFit, match=r"kept states \(state_checkpoints\) 50,000.0 MiB .* at most 3\d\d fits$"):
        plan_memory(sizes_of(state_checkpoints=1000), memory, room)
    plain = dataclasses.replace(memory, states=0, checkpoint=0)
    assert plan_memory(sizes_of(state_checkpoints=3), plain, room).checkpoint_bytes == 0


def test_what_was_taken_with_the_weights_counts_once_and_not_as_weights(llama_path: pathlib.Path) -> None:
    folder, room = ModelFolder.open(llama_path), Room(GPU, 79 * GIB, 80 * GIB)
    weights = WeightMemory(4 * GIB, scratch=256 * MIB)
    estimate = model_memory(folder.config.description, sizes_of(), weights, torch.bfloat16)
    plain = model_memory(folder.config.description, sizes_of(), WeightMemory(4 * GIB), torch.bfloat16)
    assert estimate.activations == plain.activations + 256 * MIB
    assert estimate.rotary == plain.rotary > 0
    profile = Profile(weights=4 * GIB + 256 * MIB + estimate.rotary, activations=2 * GIB, free=70 * GIB)
    measured = measured_memory(estimate, profile, room)
    assert (measured.weights, measured.activations) == (4 * GIB, 2 * GIB + 256 * MIB)
    assert measured.rotary == estimate.rotary
    # 79 GiB were free; 70 are left beside what was taken.
    assert measured.other == 79 * GIB - 70 * GIB - profile.weights


@pytest.mark.parametrize(
    ("family", "fields", "num_rotations"),
    [
        ("llama", {}, 1),
        ("gpt-oss", {}, 1),
        ("qwen3.5", {}, 1),
        # Windows' layers by themselves; of Gemma 4 with smaller heads than the others.
        ("gemma3", {}, 2),
        ("gemma4", {}, 2),
        # Layers that do not rotate have a table of angles of 0.
        ("smollm3", {}, 2),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}, 1),
    ],
)
def test_rotary_tables_are_planned_as_the_model_holds_them(
    family: str, fields: dict[str, object], num_rotations: int, tmp_path: pathlib.Path
) -> None:
    """Whole on each of several ranks, for as many tokens as a sequence may have."""
    transformers_config = CONFIGS[family]()
    for name, value in fields.items():
        setattr(transformers_config, name, value)
    make_model(transformers_config).save_pretrained(tmp_path)
    config = ModelFolder.open(tmp_path).config
    for max_model_len, tp in ((96, 1), (256, 2)):
        build = ModelBuild(config, torch.bfloat16, CPU, shard=Shard(0, tp), max_position=max_model_len)
        held = [module.table.nbytes for module in build.empty_model().modules() if isinstance(module, RotaryTable)]
        sizes, part = sizes_of(max_model_len, tp=tp, num_blocks=1), rank_part(config.description, tp)
        memory, plan = plan_estimate(sizes, part, weight_memory(build), build.dtype, Room(CPU, GIB))
        assert len(held) == num_rotations and plan.rotary_bytes == sum(held) > 0
        # Beside the weights, which the model states without them.
        assert plan.weight_bytes == build.empty_model().weight_bytes
        without = dataclasses.replace(memory, rotary=0)
        assert memory.beside_cache == without.beside_cache + sum(held)


def test_a_context_whose_rotary_tables_leave_no_room_for_a_cache_is_refused(llama_path: pathlib.Path) -> None:
    folder = ModelFolder.open(llama_path)
    sizes = sizes_of(1 << 20, num_blocks=1, graph_sizes="off", max_num_batched_tokens=16, max_num_seqs=1)

    def estimate(free: int) -> ModelMemory:
        return plan_estimate(sizes, folder.config.description, WeightMemory(0), torch.bfloat16, Room(CPU, free))[0]

    needed = estimate(GIB)
    # Heads of 8: 4 cosines and 4 sines in fp32.
    assert needed.rotary == (1 << 20) * 8 * 4
    assert estimate(needed.beside_cache + needed.kv_block) == needed
    with pytest.raises(DoesNotFit, match=r"\+ rotary tables 32\.0 MiB \+ activations"):
        estimate(needed.beside_cache + needed.kv_block - 1)


def test_the_models_bytes_are_those_it_allocates(llama_path: pathlib.Path) -> None:
    folder = ModelFolder.open(llama_path)
    memory = model_memory(
        folder.config.description, sizes_of(block_size=32), WeightMemory(2 * folder.parameter_count), torch.bfloat16
    )
    assert memory.weights == 2 * folder.parameter_count
    assert (
        memory.kv_block == len(folder.config.description.layers) * torch.zeros(2, 2, 32, 8, dtype=torch.bfloat16).nbytes
    )
    # At the least the logits of every row.
    assert memory.activations > 64 * 97 * 4


def test_what_ranks_on_a_cpu_gather_is_planned(llama_path: pathlib.Path) -> None:
    model = ModelFolder.open(llama_path).config.description

    def per_token(tp: int, dtype: torch.dtype, on_gpu: bool = False) -> int:
        def activations(tokens: int) -> int:
            sizes = sizes_of(tp=tp, graph_sizes="off", max_num_batched_tokens=tokens)
            return model_memory(model, sizes, WeightMemory(0), dtype, on_gpu).activations

        return activations(101) - activations(100)

    gathered = 4 * model.hidden_size * 4
    # Everybody's, and two sums.
    assert per_token(4, torch.float32) == per_token(1, torch.float32) + gathered + 2 * 4 * model.hidden_size
    # As many numbers of half the size; two sums and a summand in fp32.
    assert per_token(4, torch.bfloat16) == per_token(1, torch.bfloat16) + gathered // 2 + 3 * 4 * model.hidden_size
    assert per_token(4, torch.bfloat16, on_gpu=True) == per_token(1, torch.bfloat16, on_gpu=True)


def test_free_memory_is_what_the_kernel_says_or_less() -> None:
    free = free_memory_bytes(CPU)
    assert 0 < free < int(pathlib.Path("/proc/meminfo").read_text().split()[1]) * 1024


def test_a_context_longer_than_the_models_is_refused(llama_path: pathlib.Path) -> None:
    folder = ModelFolder.open(llama_path)
    assert checked_max_model_len(config_of(), folder) == 256
    assert checked_max_model_len(config_of(max_model_len=100), folder) == 100
    with pytest.raises(StartRefused, match="max_model_len is 257; the model's context has 256 tokens"):
        checked_max_model_len(config_of(max_model_len=257), folder)


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99", ""])
def test_devices_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(StartRefused, match="device is"):
        choose_device(name)


def test_auto_means_fp32_on_a_cpu_and_the_models_type_elsewhere(llama_path: pathlib.Path) -> None:
    model = ModelFolder.open(llama_path).config
    assert choose_dtype("auto", model, CPU) == torch.float32
    assert choose_dtype("auto", model, torch.device("cuda", 0)) == getattr(torch, model.torch_dtype)
    assert choose_dtype("bf16", model, CPU) == torch.bfloat16


@pytest.mark.parametrize(("kv_dtype", "head_bytes"), [("auto", 2 * 128), ("int8", 128 + 4), ("fp8", 128 + 4)])
def test_a_block_is_planned_as_it_is_allocated(kv_dtype: str, head_bytes: int) -> None:
    model = demo_config(num_hidden_layers=3, num_key_value_heads=2, head_dim=128).description
    sizes = sizes_of(kv_dtype=kv_dtype, block_size=32)
    memory = model_memory(model, sizes, WeightMemory(0), torch.bfloat16)
    shape = (1, 2, 2, sizes.block_size, 128)
    caches = allocate_kv_caches(3, shape, kv_type(kv_dtype, torch.bfloat16), CPU)
    assert memory.kv_block == cache_bytes(caches) == 2 * 3 * 2 * 32 * head_bytes
