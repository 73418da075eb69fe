"""The arithmetic of memory, and which configurations are refused before anything is allocated."""

from __future__ import annotations

import pathlib

import pytest
import torch

from headrace_backend.config import EngineConfig
from headrace_backend.worker.device import choose_device, choose_dtype
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.memory_plan import (
    ModelMemory,
    Room,
    free_memory_bytes,
    measured_memory,
    model_memory,
    plan_estimate,
    plan_memory,
)
from headrace_backend.worker.profile_step import Profile
from headrace_backend.worker.start_up import checked_max_model_len
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
MIB = 1 << 20
GIB = 1 << 30
MEMORY = ModelMemory(weights=100 * MIB, activations=50 * MIB, kv_block=MIB)


def config_of(path: pathlib.Path = pathlib.Path("model"), **values: object) -> EngineConfig:
    return EngineConfig.model_validate({"model": path, **values})


def test_a_cpu_cache_gets_a_quarter_of_what_is_free_and_at_most_four_gib() -> None:
    assert plan_memory(config_of(), MEMORY, 16, Room(CPU, 2 * GIB)).num_blocks == 512
    assert plan_memory(config_of(), MEMORY, 16, Room(CPU, 64 * GIB)).num_blocks == 4096


def test_a_gpu_cache_gets_what_the_model_leaves() -> None:
    plan = plan_memory(config_of(), MEMORY, 16, Room(GPU, 10 * GIB, 11 * GIB))
    assert plan.reserve_bytes == 256 * MIB
    assert plan.num_blocks == (10 * GIB - 256 * MIB - 150 * MIB) // MIB
    large = plan_memory(config_of(), MEMORY, 16, Room(GPU, 130 * GIB, 140 * GIB))
    assert large.reserve_bytes == int(0.0075 * 140 * GIB)


def test_configured_sizes_hold_whatever_is_free() -> None:
    by_bytes = plan_memory(config_of(kv_memory=10 * MIB + 5), MEMORY, 10**6, Room(CPU, GIB))
    assert (by_bytes.num_blocks, by_bytes.kv_cache_bytes) == (10, 10 * MIB)
    assert plan_memory(config_of(kv_memory=MIB, num_blocks=3), MEMORY, 10**6, Room(CPU, GIB)).num_blocks == 3


@pytest.mark.parametrize(
    ("values", "max_model_len", "free", "message"),
    [
        ({}, 16 * 600, GIB, r"600 blocks of 16 tokens.*= 750.0 MiB; 1,024.0 MiB are free on cpu.*a quarter"),
        ({"num_blocks": 1000}, 16, GIB, r"= 1,150.0 MiB; 1,024.0 MiB are free on cpu, num_blocks is 1000"),
        ({"kv_memory": 5}, 16, GIB, r"kv_memory is 5"),
        ({}, 16, 100 * MIB, r"weights 100.0 MiB \+ activations 50.0 MiB"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    values: dict[str, object], max_model_len: int, free: int, message: str
) -> None:
    with pytest.raises(StartRefused, match=message):
        plan_memory(config_of(**values), MEMORY, max_model_len, Room(CPU, free))


def test_the_models_bytes_are_those_it_allocates(llama_path: pathlib.Path) -> None:
    folder = ModelFolder.open(llama_path)
    memory = model_memory(folder.config, config_of(block_size=32), folder.parameter_count, torch.bfloat16)
    assert memory.weights == 2 * folder.parameter_count
    assert memory.kv_block == folder.config.num_layers * torch.zeros(2, 2, 32, 8, dtype=torch.bfloat16).nbytes
    # At the least the logits of every row.
    assert memory.activations > 64 * 97 * 4


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
