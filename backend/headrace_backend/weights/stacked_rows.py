"""From the tensors that hold all experts of a layer to the projections of each expert.

    experts.0.gate_up_proj [hidden, 2 inner] -transposed-> rows that alternate -> gates, ups

Owns the destinations that put such rows where they belong, and the targets that a folder's names
stand for. Which bytes are an expert's is `headrace_model_folder.stacked_experts`'.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from headrace_backend.weights.destination import Destination
from headrace_backend.weights.mxfp4_rows import Mxfp4Rows
from headrace_backend.weights.placement import WeightTarget
from headrace_model_folder import ModelDescription
from headrace_model_folder.description import Mlp, StackedExperts
from headrace_model_folder.stacked_experts import expert_tensor

Targets = Mapping[str, WeightTarget]


class AlternatingRows(Destination):
    """Two destinations of one size, whose rows alternate in the file."""

    def __init__(self, even: Destination, odd: Destination) -> None:
        assert even.shape == odd.shape and even.block == odd.block
        self._even, self._odd = even, odd
        self.shape = (2 * even.shape[0], *even.shape[1:])
        self.dtype, self.device, self.block = even.dtype, even.device, even.block

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        for into, parity in ((self._even, 0), (self._odd, 1)):
            begin = (first + parity) % 2
            own = rows[begin::2]
            if len(own):
                into.put((first + begin) // 2, own)


class TransposedRows(Destination):
    """A destination whose inputs are the rows of the file.

    They are kept until all are there, as a destination takes outputs whole.
    """

    def __init__(self, into: Destination) -> None:
        num_outputs, num_inputs = into.shape
        self._into = into
        self.shape, self.dtype, self.device = (num_inputs, num_outputs), into.dtype, into.device
        self._lock = threading.Lock()
        self._staged: Tensor | None = None
        self._missing = num_inputs

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        with self._lock:
            if self._staged is None:
                self._staged = torch.empty(self.shape, dtype=rows.dtype, device=rows.device)
            self._staged[first : first + len(rows)] = rows
            self._missing -= len(rows)
            if self._missing == 0:
                whole, self._staged = self._staged, None
                self._missing = self.shape[0]
                self._into.put(0, whole.t().contiguous())


def with_stacked_experts(targets: Targets, model: ModelDescription) -> dict[str, WeightTarget]:
    """Returns the targets by the names of `split_stacked`, made to take what lies there.

    Args:
        targets: Targets of projections by their own names, of some tensors or of all.
        model: The model's description.
    """
    found = dict(targets)
    for experts in model.expert_layers:
        if experts.stacked is not None:
            for number, expert in enumerate(experts.experts):
                found.update(_expert_targets(found, experts.stacked, expert, number))
    return found


def _expert_targets(
    targets: dict[str, WeightTarget], stacked: StackedExperts, expert: Mlp, number: int
) -> Iterator[tuple[str, WeightTarget]]:
    """Targets of one expert's tensors; those of its projections are taken out."""
    gate_up, down = (expert_tensor(stacked, name, number) for name in (stacked.gate_up, stacked.down))
    for end, suffix in (("weight", ""), ("bias", "_bias")):
        gate, up = (targets.pop(f"{part.name}.{end}", None) for part in (expert.gate, expert.up))
        if gate is not None and up is not None:
            yield from _stored(f"{gate_up}{suffix}", gate, up)
        if (target := targets.pop(f"{expert.down.name}.{end}", None)) is not None:
            yield from _stored(f"{down}{suffix}", target)


def _stored(name: str, first: WeightTarget, *others: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
    """The targets of a tensor as the folder has it, whose outputs are one projection's or two's.

    These are a bias as it is, a plain weight transposed, or the blocks and scales of MXFP4. A rank
    keeps the same rows of both projections.
    """
    count = 1 + len(others)
    outputs = range(count * first.rows.start, count * first.rows.stop)
    into = [first.destination, *(other.destination for other in others)]
    mxfp4 = [rows for rows in into if isinstance(rows, Mxfp4Rows)]
    if mxfp4:
        blocks, scales = _joined([rows.blocks for rows in mxfp4]), _joined([rows.scales for rows in mxfp4])
        yield f"{name}_blocks", WeightTarget(blocks, outputs, first.columns)
        yield f"{name}_scales", WeightTarget(scales, outputs, first.columns)
    elif first.columns is None:
        yield name, WeightTarget(_joined(into), outputs)
    else:
        yield name, WeightTarget(TransposedRows(_joined(into)), first.columns, outputs)


def _joined(into: Sequence[Destination]) -> Destination:
    """One projection's rows, or by turns those of two."""
    return into[0] if len(into) == 1 else AlternatingRows(*into)
