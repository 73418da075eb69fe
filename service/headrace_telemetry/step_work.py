"""What a step had to compute and to move, as shares of what the device was measured to do.

Owns the arithmetic, for step spans and metrics alike; knows neither. Counted is what the step
needed, not what padding added, so that a share says how much of the device was put to use:

    bytes  weights once + keys and values of all context that decodes read + those that were written
           (of a mixture, experts that so many tokens hit, if each chose any with equal odds)
           + states of recurrent layers, read and written once for each sequence
    flops  linear layers per token + attention per pair of query and key + output layer per sampled
    token
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace_facts import facts
from headrace_facts.step_records import Records

Floats = npt.NDArray[np.float64]


def seconds(records: Records) -> Floats:
    """How long the device computed each step [num_steps], at least a microsecond.

    Clocks of device and host differ.
    """
    begun, ended = records["started_at_ns"].astype(np.int64), records["finished_at_ns"].astype(np.int64)
    lengths: Floats = np.maximum((ended - begun) * 1e-9, 1e-6)
    return lengths


def moved_bytes(engine: facts.EngineFacts, records: Records) -> Floats:
    """Bytes of device memory that each step needed [num_steps]."""
    cached = records["context_tokens"].astype(np.float64) + records["num_prefill_tokens"] + records["num_decodes"]
    states = 2.0 * engine.row_state_bytes * records["num_sequences"]
    return np.asarray(engine.weight_bytes + _hit_bytes(engine, records) + engine.kv_bytes_per_token * cached + states)


def _hit_bytes(engine: facts.EngineFacts, records: Records) -> Floats:
    """Bytes of the experts that each step's tokens are expected to choose [num_steps]."""
    tokens = records["num_prefill_tokens"].astype(np.float64) + records["num_decodes"]
    return np.asarray(engine.expert_bytes * (1.0 - (1.0 - engine.expert_share) ** tokens))


def flops(engine: facts.EngineFacts, records: Records) -> Floats:
    """Floating-point operations that each step needed [num_steps].

    A decode attends to its context: one pair per token of it.
    """
    tokens = records["num_prefill_tokens"].astype(np.float64) + records["num_decodes"]
    pairs = records["attention_pairs"].astype(np.float64) + records["context_tokens"]
    sampled = records["num_samples"].astype(np.float64)
    return np.asarray(
        engine.flops_per_token * tokens + engine.flops_per_pair * pairs + engine.flops_per_sample * sampled
    )


def bandwidth_share(engine: facts.EngineFacts, records: Records) -> Floats | None:
    """Share of the device's copy rate that each step used [num_steps].

    None: the rate was not measured.
    """
    if engine.copy_bytes_per_s <= 0:
        return None
    return np.asarray(moved_bytes(engine, records) / seconds(records) / engine.copy_bytes_per_s)


def flops_share(engine: facts.EngineFacts, records: Records) -> Floats | None:
    """Share of the device's rate of matrix products that each step used [num_steps].

    None: the rate was not measured.
    """
    if engine.matmul_flops_per_s <= 0:
        return None
    return np.asarray(flops(engine, records) / seconds(records) / engine.matmul_flops_per_s)
