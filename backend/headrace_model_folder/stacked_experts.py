"""Tensors that hold all experts of a layer, as records of one expert each.

    experts.gate_up_proj [experts, hidden, 2 inner] -> experts.0.gate_up_proj [hidden, 2 inner], ...

Owns which bytes of such a tensor are whose. How an expert's projections lie in its part is the
backend's affair (`weights.stacked_rows`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import StackedExperts
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.safetensors_header import TensorRecord

# What the tensors of both projections end with: plain, their biases, and MXFP4's two parts.
_SUFFIXES = ("", "_bias", "_blocks", "_scales")

Records = Mapping[str, TensorRecord]


def expert_tensor(stacked: StackedExperts, tensor: str, number: int) -> str:
    """Name of one expert's part of a tensor, such as `model.layers.0.mlp.experts.3.down_proj`.

    Args:
        stacked: The layer's tensors.
        tensor: Whole name of one of them.
        number: Number of the expert.
    """
    return f"{stacked.name}.{number}{tensor.removeprefix(stacked.name)}"


def split_stacked(config: ModelConfig, records: Records) -> Records:
    """Returns the records with each stacked tensor replaced by its experts' parts.

    Args:
        config: The folder's configuration, which the records agree with.
        records: Checkpoint tensor name -> where it lies.
    """
    split = dict(records)
    for experts in config.description.expert_layers:
        if experts.stacked is not None:
            for tensor in (
                f"{name}{end}" for name in (experts.stacked.gate_up, experts.stacked.down) for end in _SUFFIXES
            ):
                if (record := split.pop(tensor, None)) is not None:
                    split.update(_parts(experts.stacked, tensor, record))
    return split


def split_joined(config: ModelConfig, records: Records) -> Records:
    """Returns the records with tensors of all experts of a layer replaced by each projection's own.

    These hold experts one after the other: gates and then ups of each, and their down projections,
    outputs before inputs. Folders have them or a tensor for each projection.

    Args:
        config: The folder's configuration.
        records: Checkpoint tensor name -> where it lies.

    Raises InvalidModelFolder for other shapes than the configuration's.
    """
    split = dict(records)
    for experts in config.description.expert_layers:
        if experts.joined is None:
            continue
        count, inner, hidden = len(experts.experts), experts.inner, experts.down.outputs
        for tensor, shape in (("gate_up_proj", (count, 2 * inner, hidden)), ("down_proj", (count, hidden, inner))):
            name = f"{experts.joined}.{tensor}"
            if (record := split.pop(name, None)) is None:
                continue
            if record.shape != shape:
                raise InvalidModelFolder(
                    f"{record.file}: tensor {shown(name)} has shape {list(record.shape)}, {list(shape)} expected from "
                    "config.json"
                )
            # All experts' outputs, one after the other.
            record = dataclasses.replace(record, shape=(count * shape[1], shape[2]))
            for expert, part in zip(experts.experts, _rows(record, count), strict=True):
                linears = (expert.gate, expert.up) if tensor == "gate_up_proj" else (expert.down,)
                own = zip(linears, _rows(part, len(linears)), strict=True)
                split.update((f"{linear.name}.weight", rows) for linear, rows in own)
    return split


def _rows(record: TensorRecord, count: int) -> Iterator[TensorRecord]:
    """Equal parts of a tensor along its first dimension."""
    shape = (record.shape[0] // count, *record.shape[1:])
    num_bytes = record.num_bytes // count
    for number in range(count):
        offset = record.offset + number * num_bytes
        yield dataclasses.replace(record, shape=shape, offset=offset, num_bytes=num_bytes)


def _parts(stacked: StackedExperts, tensor: str, record: TensorRecord) -> Iterator[tuple[str, TensorRecord]]:
    """Name and record of each expert's part: [rows] or [rows, columns]."""
    count, rows, *columns = record.shape
    shape = (rows, math.prod(columns)) if columns else (rows,)
    num_bytes = record.num_bytes // count
    for number in range(count):
        offset = record.offset + number * num_bytes
        part = dataclasses.replace(record, shape=shape, offset=offset, num_bytes=num_bytes)
        yield expert_tensor(stacked, tensor, number), part
