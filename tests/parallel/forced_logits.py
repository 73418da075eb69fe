"""One rank of a check of logits, as a process (`benchmarks.rank_processes`).

The same tokens, forced, through one model after the other, in a group that is joined once.

Rank 0 writes the logits of each case to FOLDER/TP-CASE.npy. All ranks must have had the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from benchmarks import rank_processes
from tests.support.model_builds import load_model
from tests.worker.driver import BLOCK_SIZE, Entry, admission, step

from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.rendezvous import Seat
from headrace_backend.step.plan import StepPlan
from headrace_backend.weights.placement import Shard
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.start_up.fitted_runner import make_runner
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, kv_type
from headrace_backend.worker.step.runner import CapturesGraphs, Runner
from headrace_model_folder import ModelFolder

MAX_MODEL_LEN = 256
_NUM_BLOCKS = 40
_BLOCKS = {0: list(range(10)), 1: list(range(10, 20))}
# Of row 0; row 1 comes whole, in the second step.
_CHUNKS = (100, 19)
_SECOND = 37
_DECODES = 16
_HASH_BYTES = 7


def _ignore(phase: str, done: int, total: int, unit: str) -> None:
    """Ignores progress: nobody waits."""


class Case(NamedTuple):
    """What a model is kept in."""

    quantize: str = "off"
    group: int = 128
    head: str = "off"
    kv_dtype: str = "auto"
    # Whether ranks have some experts whole.
    whole_experts: bool = False


CASES = {
    "plain": Case(),
    "experts": Case(whole_experts=True),
    "kv-fp8": Case(kv_dtype="fp8"),
    "kv-int8": Case(kv_dtype="int8"),
    "int4": Case("int4"),
    "int4-32-kv-int8": Case("int4", 32, kv_dtype="int8"),
    "int8-kv-int8": Case("int8", head="int8", kv_dtype="int8"),
    "fp8-kv-fp8": Case("fp8", head="fp8", kv_dtype="fp8"),
}


def plans(vocab_size: int) -> Iterator[StepPlan]:
    """A prompt in chunks, another one beside it, then both rows token by token.

    Every token is known.
    """
    ids = [int(token) for token in np.random.default_rng(5).integers(3, vocab_size, MAX_MODEL_LEN)]
    starts = {0: 0, 1: 0}

    def entry(row: int, count: int) -> Entry:
        start = starts[row]
        starts[row] += count
        return Entry(row, start, ids[start + row : start + row + count], (row,), start)

    first, second = _CHUNKS
    yield step([entry(0, first)], [admission(0)], {0: _BLOCKS[0]})
    yield step([entry(0, second), entry(1, _SECOND)], [admission(1)], {1: _BLOCKS[1]})
    yield step([entry(1, 1)])
    for _ in range(_DECODES):
        yield step([entry(0, 1), entry(1, 1)])


def runner_of(case: Case, folder: ModelFolder, device: torch.device, shard: Shard) -> tuple[CausalLM, Runner]:
    """The model and what computes its steps, on a card with graphs."""
    on_card = device.type == "cuda"
    settings = {"model": folder.path, "device": str(device), "kv_dtype": case.kv_dtype, "max_num_seqs": 4}
    settings |= {"max_num_batched_tokens": 256, "graph_sizes": "1,2,4" if on_card else "off"}
    config, dtype = EngineConfig.model_validate(settings), torch.bfloat16 if on_card else torch.float32
    schemes = Schemes.named(case.quantize, case.group, case.head)
    bits = {"scheme": schemes.layers, "head": schemes.head}
    model = load_model(folder, folder.config, dtype, device, "folder", 0, _ignore, MAX_MODEL_LEN, shard=shard, **bits)
    size = (_NUM_BLOCKS, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    caches = allocate_kv_caches(model.num_layers, size, kv_type(case.kv_dtype, dtype), device)
    runner = make_runner(model, WorkerSizes.of(config, MAX_MODEL_LEN), caches)
    if isinstance(runner, CapturesGraphs):
        runner.capture(_ignore)
    return model, runner


def forced(case: Case, folder: ModelFolder, device: torch.device, shard: Shard) -> tuple[np.ndarray, list[int]]:
    """Logits fp32 [positions, vocabulary] and the tokens that were drawn from them."""
    model, runner = runner_of(case, folder, device, shard)
    logits, tokens = [], []
    with torch.inference_mode():
        for plan in plans(folder.config.vocab_size):
            hidden = runner.forward(plan)
            logits.append(model.logits(hidden).float().cpu())
            drawn = runner.sample(plan, hidden)
            assert drawn is not None
            tokens += drawn.tokens.tolist()
    return torch.cat(logits).numpy(), tokens


def check_alike(collectives: Collectives, logits: np.ndarray, tokens: list[int]) -> None:
    """Raises AssertionError unless all ranks have the same."""
    digest = hashlib.sha256(logits.tobytes() + str(tokens).encode()).digest()[:_HASH_BYTES]
    found = collectives.all_values(int.from_bytes(digest, "little"))
    assert all(value == found[0] for value in found), f"ranks differ: {found}"


def run_rank(seat: Seat, kind: str, folder: pathlib.Path, names: list[str], out: pathlib.Path) -> None:
    """One rank; rank 0 prints a line of JSON per case."""
    device = rank_processes.device_of(kind, seat)
    collectives = rank_processes.joined(seat, device)
    shard = Shard(seat.rank, seat.world_size, collectives)
    opened = ModelFolder.open(folder)
    for name in names:
        case = CASES[name]
        own = dataclasses.replace(shard, whole_experts=case.whole_experts)
        logits, tokens = forced(case, opened, device, own)
        if collectives is not None:
            check_alike(collectives, logits, tokens)
        if seat.rank == 0:
            np.save(out / f"{seat.world_size}-{name}.npy", logits)
            print(json.dumps({"case": name, "tokens": tokens}), flush=True)


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser()
    rank_processes.add_seat(parser)
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    about = (options.seat, options.device, options.folder, options.cases.split(","), options.out)
    rank_processes.end_rank(functools.partial(run_rank, *about))


if __name__ == "__main__":
    main()
