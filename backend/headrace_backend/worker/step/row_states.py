"""States of recurrent layers: in each such layer a line for each row of the batch.

Owns their memory, and the copies between lines that a plan asks for. A sequence that begins in a
row finds its state empty whatever lies there, so nothing is cleared when rows change hands. The
line behind the rows' is scratch, which padding may have; behind it are those of checkpoints, states
that are kept for prefixes, which no pass reads or writes. What the numbers of a line are is the
layer's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headrace_backend.step.plan import ForwardPlan
from headrace_backend.worker.device_copies import indices_on_device
from headrace_backend.worker.step.lazy_memory import zeros

# Elements that a copy holds between reading and writing, 64 MiB of them.
_PIECE_ELEMENTS = 1 << 24


def allocate_row_states(
    num_rows: int, num_elements: int, device: torch.device, num_checkpoints: int = 0
) -> torch.Tensor:
    """Zeroed states of a layer, fp32 [num_rows + 1 + num_checkpoints, num_elements]."""
    return zeros((num_rows + 1 + num_checkpoints, num_elements), torch.float32, device)


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
    layers = list(filter(holds_states, caches))
    # A pipeline stage may have none.
    if not plan.state_sources.size or not layers:
        return
    lines = (plan.state_sources, plan.state_targets)
    sources, targets = (indices_on_device(column, layers[0].device) for column in lines)
    width = max(_PIECE_ELEMENTS // len(sources), 1)
    for states in layers:
        for piece in torch.split(states, width, dim=1):
            piece[targets] = piece[sources]
