"""RMS norm with its weight, alone or fused with the residual addition.

It returns the form that the product behind it takes.

Every rank holds the whole weight.

A norm behind a projection whose inputs are shared out takes the ranks' partial outputs and adds
them up first: `residual_norm` makes the right kind. Where a layer reads the residual stream without
a norm, `PlainStream` stands in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headrace_backend.layers.sharded_module import CheckpointPart, ShardedModule
from headrace_backend.weights.destination import RaisedRows, TensorRows
from headrace_backend.weights.placement import Placement, WeightTarget
from headrace_kernels.input_rounding import InputRounding
from headrace_kernels.rms_norm import add_rms_norm, rms_norm, rounded_add_rms_norm, rounded_rms_norm, summed
from headrace_kernels.rounded_tokens import Activations, round_tokens
from headrace_model_folder.description import Norm


class RmsNorm(ShardedModule):
    """RMS norm over the last dimension."""

    def __init__(self, norm: Norm, placement: Placement) -> None:
        super().__init__()
        self._name = norm.name
        self._adds_one = norm.adds_one
        self.weight = norm_weight(norm, norm.size, placement)
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual stream in place and returns the norm of the sum.

        All are [num_tokens, size]; x may be in parts, [num_tokens, parts, size].
        """
        return add_rms_norm(x, residual, self.weight, self.eps)

    def of_stream(
        self, pending: Tensor | None, residual: Tensor, rounding: InputRounding | None, keeps: bool = False
    ) -> Activations:
        """The norm of the residual stream, to which `pending` is added first in place.

        Args:
            pending: [num_tokens, size] the output of the projection before, of several ranks this
                one's part of it, which may be overwritten; or [num_tokens, parts, size], which are
                added up first; None: nothing is added.
            residual: [num_tokens, size].
            rounding: How it is rounded to 8 bits; None: it keeps the model's type.
            keeps: Whether what is rounded is read in the model's type too.
        """
        return self.of_sum(pending, residual, rounding, keeps)

    def of_output(self, x: Tensor) -> Tensor:
        """The norm of a projection's output, of several ranks of the sum of their parts.

        [num_tokens, size] -> the same shape; x may be overwritten.
        """
        normed: Tensor = self(x)
        return normed

    def of_sum(
        self, added: Tensor | None, residual: Tensor, rounding: InputRounding | None, keeps: bool = False
    ) -> Activations:
        """Returns the norm of the stream and `added`, the whole output or its parts."""
        about = (residual, self.weight, self.eps)
        if added is None:
            return rms_norm(*about) if rounding is None else rounded_rms_norm(*about, rounding, keeps)
        return add_rms_norm(added, *about) if rounding is None else rounded_add_rms_norm(added, *about, rounding, keeps)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """The weight."""
        rows = (RaisedRows if self._adds_one else TensorRows)(self.weight)
        yield CheckpointPart(f"{self._name}.weight", WeightTarget(rows, range(self.weight.shape[0])))


class SummingRmsNorm(RmsNorm):
    """The norm where outputs of several ranks meet the residual stream."""

    def __init__(self, norm: Norm, placement: Placement) -> None:
        super().__init__(norm, placement)
        self._shard = placement.shard

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """All-reduces x, adds it to the residual stream in place and returns the norm of that.

        All are [num_tokens, size]; x may be overwritten.
        """
        return self._shard.together.add_rms_norm(x, residual, self.weight, self.eps)

    def of_output(self, x: Tensor) -> Tensor:
        """Returns the norm of the all-reduced x, which may be overwritten."""
        normed: Tensor = self(self._shard.together.all_reduce(x))
        return normed

    def of_stream(
        self, pending: Tensor | None, residual: Tensor, rounding: InputRounding | None, keeps: bool = False
    ) -> Activations:
        """Returns the norm of the residual stream after adding the all-reduced `pending` to it.

        `pending` may be overwritten.
        """
        if pending is None:
            return self.of_sum(None, residual, rounding, keeps)
        if rounding is None:
            return self.add(pending, residual)
        if keeps:
            # The kernels that all-reduce store one form.
            normed = self.add(pending, residual)
            return dataclasses.replace(round_tokens(normed, rounding), unrounded=normed)
        return self._shard.together.rounded_add_rms_norm(pending, residual, self.weight, self.eps, rounding)


def norm_weight(norm: Norm, size: int, placement: Placement) -> nn.Parameter:
    """The factors of a norm, still to be filled: `size` of them, in fp32 if that decides rounding.

    A factor that is 1 more than a number of the checkpoint has no room in 16 bits either.
    """
    is_wide = norm.rounds_once or norm.adds_one
    return (dataclasses.replace(placement, dtype=torch.float32) if is_wide else placement).empty(size)


class PlainStream(nn.Module):
    """The residual stream as it is, where others have its norm. What is added to it is whole."""

    def of_stream(
        self, pending: Tensor | None, residual: Tensor, rounding: InputRounding | None, keeps: bool = False
    ) -> Activations:
        """Returns the residual stream, to which `pending` is added first in place.

        Args:
            pending: [num_tokens, size] the whole output of the layer before, or its parts
                [num_tokens, parts, size]; None: there is none.
            residual: [num_tokens, size].
            rounding: How it is rounded to 8 bits; None: it is the stream itself.
            keeps: Whether what is rounded is read in the model's type too.
        """
        return self.of_sum(pending, residual, rounding, keeps)

    def of_sum(
        self, added: Tensor | None, residual: Tensor, rounding: InputRounding | None, keeps: bool = False
    ) -> Activations:
        """Does what `of_stream` does."""
        if added is not None:
            residual.add_(summed(added))
        if rounding is None:
            return residual
        return dataclasses.replace(round_tokens(residual, rounding), unrounded=residual if keeps else None)


def residual_norm(norm: Norm, placement: Placement, is_whole: bool = False) -> RmsNorm:
    """The norm behind a `RowLinear`'s output, for one rank or several.

    Args:
        norm: Its name and size.
        placement: Type, device and rank.
        is_whole: Whether several ranks' parts of that output have been added up already.
    """
    kind = RmsNorm if is_whole or placement.shard.world_size == 1 else SummingRmsNorm
    return kind(norm, placement)


def stream_norm(norm: Norm | None, placement: Placement, is_whole: bool) -> RmsNorm | PlainStream:
    """What stands before a part of a layer: its norm, or none. See `residual_norm`."""
    if norm is None:
        assert is_whole, "what is added without a norm behind it is whole"
        return PlainStream()
    return residual_norm(norm, placement, is_whole)
