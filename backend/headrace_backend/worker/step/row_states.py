"""States of recurrent layers: in each such layer a line for each row of the batch.

Owns their memory, and the copies between rows that a plan asks for. A sequence that begins in a row
finds its state empty whatever lies there, so nothing is cleared when rows change hands. The last
line is scratch, which padding may have. What the numbers of a line are is the layer's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headrace_backend.step.plan import ForwardPlan
from headrace_backend.worker.device_copies import indices_on_device
from headrace_backend.worker.step.lazy_memory import zeros


def allocate_row_states(num_rows: int, num_elements: int, device: torch.device) -> torch.Tensor:
    """Zeroed states of a layer, fp32 [num_rows + 1, num_elements]."""
    return zeros((num_rows + 1, num_elements), torch.float32, device)


def holds_states(cache: torch.Tensor) -> bool:
    """Whether a layer's cache is one of states, and not of blocks."""
    return cache.dim() == 2


def block_caches(caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The caches of blocks among those of all layers, of those that share memory the first one."""
    found: dict[int, torch.Tensor] = {}
    for cache in caches:
        if not holds_states(cache):
            found.setdefault(cache.data_ptr(), cache)
    return list(found.values())


def one_of_each(caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A cache of blocks for every number and size of heads that layers have."""
    return list({cache.shape[2:]: cache for cache in caches if not holds_states(cache)}.values())


def copy_planned_states(plan: ForwardPlan, caches: Iterable[torch.Tensor]) -> None:
    """Copies the plan's states in every layer that has some; before its forward pass.

    All are read before any is written.
    """
    if not plan.state_sources.size:
        return
    for states in filter(holds_states, caches):
        sources, targets = (indices_on_device(rows, states.device) for rows in (plan.state_sources, plan.state_targets))
        states[targets] = states[sources]
