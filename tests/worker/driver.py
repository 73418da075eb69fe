"""Drives a runner with plans made by hand, as the engine's scheduler would make them.

Nothing here decides anything by itself.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import torch

from headrace_backend.cache_groups import CacheLayout
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import ForwardPlan, PromptLogprobPlan, RowAdmission, SamplePlan, StepPlan, StepResult
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.speculation import Speculation
from headrace_backend.worker.start_up.synthetic_steps import GREEDY
from headrace_backend.worker.step.cpu_runner import CpuBatch, CpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, allocate_layer_caches, kv_type
from headrace_backend.worker.step.row_states import allocate_row_states
from headrace_backend.worker.step.runner import CausalModel, Runner
from headrace_request.sampling import Sampling

BLOCK_SIZE = 16
NUM_BLOCKS = 64
NUM_ROWS = 8
MAX_MODEL_LEN = 256


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def id_bytes(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def admission(row: int, **changes: object) -> RowAdmission:
    """A greedy row without anything else, but for the changes.

    Fields of its sampling go by their names.
    """
    wanted = {"seed": 1} | {name: changes.pop(name) for name in Sampling.__struct_fields__ if name in changes}
    sampling = msgspec.structs.replace(GREEDY.sampling, **wanted)
    return msgspec.structs.replace(GREEDY, row=row, sampling=sampling, **changes)


@dataclasses.dataclass
class Entry:
    """One row's part of a step."""

    row: int
    start: int
    # Known ids; None: the row's last sampled token, and so many drafts behind it.
    ids: list[int] | None
    # Rows that draw from the entry's last token.
    drawing: tuple[int, ...] = ()
    output_position: int = 0
    # The prompt's tokens after the first, second ... of `ids` that are reported, and how many
    # top tokens at each.
    reported: list[int] = dataclasses.field(default_factory=list)
    num_top: int = 0
    num_drafts: int = 0


def step(
    entries: list[Entry],
    admissions: list[RowAdmission] = [],  # noqa: B006
    tables: dict[int, list[int]] | None = None,
    released: tuple[int, ...] = (),
    copies: tuple[tuple[int, int], ...] = (),
    step_id: int = 1,
    num_masked: int = 0,
) -> StepPlan:
    """A plan, through its byte form, in which entries that draw nothing are checked.

    `tables`: whole block tables of some rows.
    """
    tables = tables or {}
    counts = [1 + entry.num_drafts if entry.ids is None else len(entry.ids) for entry in entries]
    ends = np.cumsum(counts)
    drawn = [
        (row, int(end) - 1 - e.num_drafts, e.output_position)
        for e, end in zip(entries, ends, strict=True)
        for row in e.drawing
    ]
    forward = ForwardPlan(
        rows=column(*(e.row for e in entries)),
        starts=column(*(e.start for e in entries)),
        counts=column(*counts),
        known_counts=column(*(0 if e.ids is None else len(e.ids) for e in entries)),
        token_ids=column(*(token for e in entries for token in e.ids or ())),
        table_rows=column(*tables),
        table_starts=column(*(0 for _ in tables)),
        table_counts=column(*(len(blocks) for blocks in tables.values())),
        table_blocks=column(*(block for blocks in tables.values() for block in blocks)),
        copy_sources=column(*(source for source, _ in copies)),
        copy_targets=column(*(target for _, target in copies)),
        checked_indices=column(*(int(end) - 1 for e, end in zip(entries, ends, strict=True) if not e.drawing)),
    )
    columns = [column(*(d[i] for d in drawn)) for i in range(3)]
    reporting = [
        (entry, int(end) - count) for entry, end, count in zip(entries, ends, counts, strict=True) if entry.reported
    ]
    prompt_logprobs = PromptLogprobPlan(
        first_indices=column(*(first for _, first in reporting)),
        counts=column(*(len(entry.reported) for entry, _ in reporting)),
        num_tops=column(*(entry.num_top for entry, _ in reporting)),
        token_ids=column(*(token for entry, _ in reporting for token in entry.reported)),
    )
    plan = StepPlan(
        step_id, column(*released), admissions, forward, SamplePlan(*columns), prompt_logprobs, num_masked=num_masked
    )
    return StepPlan.decode(plan.encode())


def make_runner(
    model: CausalModel,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: str = "auto",
    speculation: Speculation | None = None,
) -> CpuRunner:
    shape, device = (NUM_BLOCKS, 2, num_kv_heads, BLOCK_SIZE, head_dim), torch.device("cpu")
    caches = allocate_kv_caches(num_layers, shape, kv_type(kv_dtype, torch.float32), device)
    return CpuRunner(
        model,
        CpuBatch(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS),
        Sampler(NUM_ROWS, model.vocab_size, device),
        caches,
        speculation,
    )


def make_model_runner(model: CausalLM) -> CpuRunner:
    """A runner over the caches and states that the model's own layers have, which may differ."""
    device = torch.device("cpu")
    caches = allocate_layer_caches(model.kv_heads, CacheLayout(), NUM_BLOCKS, BLOCK_SIZE, torch.float32, device)
    sources = iter(model.kv_sources)
    of_layers = [
        allocate_row_states(NUM_ROWS, num_elements, device) if num_elements else caches[next(sources)]
        for num_elements in model.state_elements()
    ]
    return CpuRunner(
        model,
        CpuBatch(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS),
        Sampler(NUM_ROWS, model.vocab_size, device),
        of_layers,
        None,
    )


def execute(runner: Runner, plan: StepPlan, masks: StepMasks | None = None) -> StepResult:
    result = StepResult(plan.step_id, 0, 0, np.empty(0, np.int32), np.empty(0, np.uint8))
    sampled = runner.sample(plan, runner.forward(plan), masks)
    if sampled is not None:
        sampled.fill(result)
    return StepResult.decode(result.encode())
