"""From a valid model folder to a worker that takes steps.

Owns the phases and their order: device, memory plan (sent before anything is allocated), weights, cache, warm-up. Imports torch, and so do the rooms it calls.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

from headrace_backend.config import EngineConfig
from headrace_backend.models.registry import load_model
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.device import choose_device, choose_dtype, prepare_torch
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.input_batch import InputBatch
from headrace_backend.worker.memory_plan import free_memory_bytes, model_memory, plan_memory
from headrace_backend.worker.model_runner import ModelRunner, allocate_kv_caches
from headrace_backend.worker.sampler import Sampler
from headrace_backend.worker.step_loop import StepLoop
from headrace_backend.worker.warm_up import warm_up
from headrace_backend.worker_messages import WorkerReady
from headrace_model_folder import ModelFolder


@contextlib.contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Notes the seconds of what runs inside."""
    start = time.monotonic()
    yield
    phases[name] = time.monotonic() - start


def start_worker(config: EngineConfig, folder: ModelFolder, channel: Channel, phases: dict[str, float]) -> StepLoop:
    """Makes everything ready and says so.

    Args:
        config: The engine's configuration.
        folder: The model.
        channel: Takes the memory plan, progress and readiness.
        phases: Seconds per phase so far; further ones are added.

    Raises:
        StartRefused: The configuration is at fault.
        InvalidModelFolder: The folder is.
    """
    max_model_len = checked_max_model_len(config, folder)
    device = choose_device(config.device)
    prepare_torch(config, device)
    dtype = choose_dtype(config.dtype, folder.config, device)
    memory = model_memory(folder.config, config, folder.parameter_count, dtype)
    plan = plan_memory(config, memory, max_model_len, device, free_memory_bytes(device))
    channel.send_message(plan)
    with _timed(phases, "weights"):
        source = folder if config.load == "folder" else None
        model = load_model(
            source, folder.config, dtype, device, config.load, config.seed, channel.send_progress, max_model_len
        )
    with _timed(phases, "cache"):
        channel.send_progress("cache", 0, plan.num_blocks, "blocks")
        shape = (plan.num_blocks, 2, folder.config.num_kv_heads, config.block_size, folder.config.head_dim)
        kv_caches = allocate_kv_caches(folder.config.num_layers, shape, dtype, device)
        channel.send_progress("cache", plan.num_blocks, plan.num_blocks, "blocks")
    batch = InputBatch(config.max_num_seqs, max_model_len, config.block_size, plan.num_blocks, device)
    runner = ModelRunner(model, batch, Sampler(config.max_num_seqs, folder.config.vocab_size, device), kv_caches)
    with _timed(phases, "warm_up"):
        channel.send_progress("warm_up", 0, 1, "passes")
        warm_up(runner, kv_caches, config.block_size)
        channel.send_progress("warm_up", 1, 1, "passes")
    # What start-up made lives as long as the process; no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    channel.send_message(WorkerReady(str(device), plan.num_blocks, plan.block_size, folder.parameter_count, phases))
    return StepLoop(runner, channel, runs_ahead=device.type == "cuda")


def checked_max_model_len(config: EngineConfig, folder: ModelFolder) -> int:
    """Longest sequence in tokens.

    Raises:
        StartRefused: It is longer than the model's context.
    """
    context = folder.config.max_position_embeddings
    if config.max_model_len > context:
        raise StartRefused(f"max_model_len is {config.max_model_len}; the model's context has {context} tokens")
    return config.max_model_len or context
