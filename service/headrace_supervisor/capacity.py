"""How many users GPUs hold, and how fast: arithmetic on a model's sizes and a card's measured rates.

Owns the model, which is a floor: every step at the card's ceilings, launches and hosts for nothing. A step reads the weights (or multiplies by them, whichever takes longer) and the caches of the rows that are being written, and ranks
exchange two sums a layer. Prompts take their arithmetic's share of the time. Users write, read the answer, think, and come again; so many are active as a balance of both leaves. Where sizes come from is `plan_command`'s business.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

_MIB = 1 << 20
# One sum of a few rows in a graph, by ranks: torch's kernels of our kind on H200s, without multicast. Eight were not measured.
_EXCHANGE_S = {1: 0.0, 2: 6.8e-6, 4: 8.1e-6, 8: 11e-6}
_MOST_BUSY = 0.98
_LONGEST_ANSWER_S = 1e5
_HALVINGS = 100


class Gpu(NamedTuple):
    """A card, as it was measured."""

    memory_bytes: int
    # Read and written.
    copy_bytes_per_s: float
    # Of bf16.
    flops_per_s: float


GPUS = {
    "h200": Gpu(143_771 * _MIB, 4.27e12, 7.9e14),
    "h100": Gpu(81_559 * _MIB, 3.0e12, 7.98e14),
}


class RankSizes(NamedTuple):
    """What one of `tp` ranks has of a model (`headrace_backend.worker.plan_sizes`)."""

    tp: int
    num_layers: int
    read_bytes: int
    multiplied: int
    kv_token_bytes: int
    kv_tokens: int
    # Rows of a step.
    max_num_seqs: int


class Demand(NamedTuple):
    """Users in a closed loop, and the lengths of what they send and get, in tokens."""

    users: int
    prompt: int
    output: int
    think_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """Of one engine."""

    # Sequences that run at once: rows of a step, each of which the cache holds whole.
    rows_held: int
    # Sequences that are being written at a time, on average.
    active: float
    itl_ms: float
    answer_s: float
    # Prompts alone, or rows beyond those held, are more than it can do: users wait for each other.
    is_overloaded: bool


def exchange_s(tp: int) -> float:
    """Of one sum over so many ranks; for numbers that were not measured, that of the next larger one."""
    return next(seconds for ranks, seconds in _EXCHANGE_S.items() if ranks >= tp)


def step_s(sizes: RankSizes, gpu: Gpu, rows: float, context: float) -> float:
    """A step that decodes so many rows behind so many tokens of context each."""
    weights = max(sizes.read_bytes / gpu.copy_bytes_per_s, 2 * sizes.multiplied * rows / gpu.flops_per_s)
    caches = rows * context * sizes.kv_token_bytes / gpu.copy_bytes_per_s
    return weights + caches + 2 * sizes.num_layers * exchange_s(sizes.tp)


def predict(sizes: RankSizes, gpu: Gpu, demand: Demand) -> Prediction:
    """The balance of one engine with all of the users."""
    held = min(sizes.kv_tokens // (demand.prompt + demand.output), sizes.max_num_seqs)
    low, high = 0.0, _LONGEST_ANSWER_S
    for _ in range(_HALVINGS):
        answer_s = (low + high) / 2
        # Answers that take longer come less often, and the longer they are assumed to take the less there is to do.
        if _answer_s(sizes, gpu, demand, held, answer_s) > answer_s:
            low = answer_s
        else:
            high = answer_s
    active = _active(demand, high)
    rows = min(active, held)
    busy = _busy(sizes, gpu, demand, high)
    itl_s = step_s(sizes, gpu, rows, demand.prompt + demand.output / 2) / (1 - min(busy, _MOST_BUSY))
    return Prediction(held, active, itl_s * 1e3, high, is_overloaded=busy > _MOST_BUSY or active > held)


def _active(demand: Demand, answer_s: float) -> float:
    return demand.users * answer_s / (answer_s + demand.think_s)


def _busy(sizes: RankSizes, gpu: Gpu, demand: Demand, answer_s: float) -> float:
    """Share of the time that goes to prompts."""
    prompts_per_s = demand.users / (answer_s + demand.think_s)
    return prompts_per_s * _prompt_s(sizes, gpu, demand)


def _prompt_s(sizes: RankSizes, gpu: Gpu, demand: Demand) -> float:
    return 2 * sizes.multiplied * demand.prompt / gpu.flops_per_s


def _answer_s(sizes: RankSizes, gpu: Gpu, demand: Demand, held: int, assumed_s: float) -> float:
    """How long an answer takes if answers take as long as assumed; rows beyond those held wait for their turn."""
    active = _active(demand, assumed_s)
    rows = max(min(active, held), 1e-9)
    step = step_s(sizes, gpu, rows, demand.prompt + demand.output / 2)
    turns = max(active / rows, 1.0)
    return turns * demand.output * step / (1 - min(_busy(sizes, gpu, demand, assumed_s), _MOST_BUSY)) + _prompt_s(
        sizes, gpu, demand
    )
