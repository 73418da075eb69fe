"""Checks that follow once all weights of a model are filled, and reports of their bits.

They run before any request does; operators read the reports.

Owns the order: each destination and each weight finishes itself, and names tensor or layer where
something is wrong. Of weights that somebody else quantized there is no original to state a distance
from; whether those look packed as their folder says is not asked here (`headrace_backend.packing`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from headrace_backend.quantization.block_linear_weight import BlockRows
from headrace_backend.quantization.head_weight import HeadWeight
from headrace_backend.quantization.linear_weight import LinearWeight, ReportedWeight, total_report
from headrace_backend.quantization.low_bit_weight import LowBitWeight, QuantizedRows
from headrace_backend.quantization.tensor_error import RoundedRows
from headrace_backend.weights.destination import CopiedRows, OrderedRows, PickedColumns
from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.scheme import QuantizationRefused, Scheme
from headrace_kernels.weight_formats.block_weight import has_negative_scales, is_finite
from headrace_model_folder import FolderQuantization, TensorRecord

_HEAD = "lm_head"


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationSummary:
    """How a model was quantized.

    Relative errors are ||quantized - original|| / ||original|| of checkpoint tensors.
    """

    scheme: Scheme
    # What the weights take in memory, scales and zero points included, per weight.
    bits_per_weight: float
    mean_relative_error: float
    worst_relative_error: float
    worst_tensor: str
    # Tensors that were rounded.
    num_tensors: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSummary:
    """How a folder or file has the weights that somebody else quantized.

    There is no original to state a distance from.
    """

    # A folder's format and its numbers, such as "gptq int4" or "compressed-tensors int4+int8", or
    # the kinds of blocks, such as "Q4_K+Q6_K"; the most frequent first.
    scheme: str
    # Inputs that share a scale; 0: all of an output's, or not the same for all weights.
    group_size: int
    # What the quantized weights take in memory, scales and zero points included, per weight.
    bits_per_weight: float
    # Weights of this rank's layers, stacked projections as one.
    num_weights: int


def summarize(
    scheme: Scheme, targets: Mapping[str, WeightTarget], weights: Mapping[str, LinearWeight]
) -> QuantizationSummary:
    """Checks all weights that were quantized while they were read, and reports their error.

    Args:
        scheme: The scheme by which they were quantized.
        targets: Targets of the layers, filled.
        weights: Path in the model -> weight.

    Raises:
        QuantizationRefused: A tensor is farther from its original than rounding can bring it, or a
            product differs from its reference. Tensor or layer is named.
    """
    rows = {name: target.destination for name, target in targets.items()}
    errors = {name: into.finish(name) for name, into in rows.items() if isinstance(into, RoundedRows)}
    _finish(weights)
    worst = max(errors, key=errors.__getitem__)
    mean = sum(errors.values()) / len(errors)
    return QuantizationSummary(scheme, _bits_per_weight(weights.values()), mean, errors[worst], worst, len(errors))


def summarize_head(scheme: Scheme, targets: Mapping[str, WeightTarget], weight: HeadWeight) -> QuantizationSummary:
    """Checks and reports the output layer as `summarize` does the layers.

    Args:
        scheme: The scheme by which it was quantized.
        targets: All targets of the model, filled.
        weight: The output layer's weight.
    """
    name, rows = _filled_by(targets, weight)
    error = rows.finish(name)
    weight.finish(_HEAD)
    return QuantizationSummary(scheme, _bits_per_weight([weight]), error, error, name)


def summarize_folder(
    quantization: FolderQuantization,
    weights: Mapping[str, LowBitWeight],
) -> StoredSummary:
    """Checks all quantized weights of a model.

    Args:
        quantization: What config.json says.
        weights: Path in the model -> weight.

    Raises:
        QuantizationRefused: A product differs from its reference. The layer is named.
    """
    _finish(weights)
    numbers = Counter(form.number for form in quantization.layers.values())
    groups = {128 if form.scales == "block" else form.group_size for form in quantization.layers.values()}
    return StoredSummary(
        f"{quantization.method} {'+'.join(number for number, _ in numbers.most_common())}",
        groups.pop() if len(groups) == 1 else 0,
        _bits_per_weight(weights.values()),
        len(weights),
    )


def summarize_blocks(
    targets: Mapping[str, WeightTarget],
    weights: Mapping[str, ReportedWeight],
    records: Mapping[str, TensorRecord],
) -> StoredSummary:
    """Checks all weights in blocks of a model, of which there is at least one.

    Args:
        targets: All targets of the model, filled.
        weights: Path in the model -> weight.
        records: The checkpoint's tensors, by name.

    Raises:
        QuantizationRefused: A scale is not finite or can't be, or a product differs from its
            reference. Tensor or layer is named.
    """
    for name, rows in block_targets(targets):
        if not is_finite(rows.weight, rows.outputs):
            raise QuantizationRefused(f"{records[name].file}: tensor {name!r} holds a scale that is not finite")
        if has_negative_scales(rows.weight):
            raise QuantizationRefused(f"{records[name].file}: tensor {name!r} holds a scale that is negative")
    _finish(weights)
    kinds = Counter(total_report(weights.values()).num_weights)
    return StoredSummary(
        "+".join(kind for kind, _ in kinds.most_common()), 0, _bits_per_weight(weights.values()), len(weights)
    )


def block_targets(targets: Mapping[str, WeightTarget]) -> Iterator[tuple[str, BlockRows]]:
    """Checkpoint name and what takes the rows of each tensor that the file has in blocks."""
    for name, target in targets.items():
        into = target.destination
        into = into.into if isinstance(into, (OrderedRows, PickedColumns)) else into
        if isinstance(into, BlockRows):
            yield name, into


def _finish(weights: Mapping[str, ReportedWeight]) -> None:
    for path, weight in weights.items():
        weight.finish(path.removesuffix(".weight"))


def _bits_per_weight(weights: Iterable[ReportedWeight]) -> float:
    report = total_report(weights)
    return 8 * report.num_bytes / sum(report.num_weights.values())


def _filled_by(targets: Mapping[str, WeightTarget], weight: HeadWeight) -> tuple[str, QuantizedRows]:
    """The checkpoint's tensor that the weight was made of."""
    for name, target in targets.items():
        into = target.destination
        rows = into.copy if isinstance(into, CopiedRows) else into
        if isinstance(rows, QuantizedRows) and rows.weight is weight.quantized:
            return name, rows
    raise AssertionError("nothing fills the output layer")
