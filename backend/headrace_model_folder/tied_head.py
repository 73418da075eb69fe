"""An output layer that config.json ties to the embedding, though the folder has one of its own.

Owns the comparison. Training that no longer shared the two leaves such folders; transformers then
takes both tensors, and so do we. Copies of the embedding are common, and stay one weight.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping

from headrace_model_folder.bounded_files import MIB, open_inside
from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import ModelDescription
from headrace_model_folder.safetensors_header import TensorRecord

_PIECE = 4 * MIB


def untied_where_different(
    folder: pathlib.Path, config: ModelConfig, tensors: Mapping[str, TensorRecord]
) -> ModelConfig:
    """Returns the config, untied if the folder's output layer differs from its embedding.

    Reads both tensors up to the first piece in which they differ.

    Args:
        folder: The model folder.
        config: Its configuration.
        tensors: The folder's tensors, by the names of the description.
    """
    model = config.description
    head, embedding = (tensors.get(f"{part.name}.weight") for part in (model.head, model.embedding))
    if not model.head.tied or head is None or embedding is None or _are_equal(folder, head, embedding):
        return config
    mtp = None if config.mtp is None else dataclasses.replace(config.mtp, description=_untied(config.mtp.description))
    return dataclasses.replace(config, description=_untied(model), mtp=mtp)


def _untied(model: ModelDescription) -> ModelDescription:
    mtp = None if model.mtp is None else _untied(model.mtp)
    return dataclasses.replace(model, head=dataclasses.replace(model.head, tied=False), mtp=mtp)


def _are_equal(folder: pathlib.Path, head: TensorRecord, embedding: TensorRecord) -> bool:
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    pieces = zip(_pieces(folder, head), _pieces(folder, embedding), strict=True)
    return all(one == other for one, other in pieces)


def _pieces(folder: pathlib.Path, record: TensorRecord) -> Iterator[bytes]:
    descriptor, _ = open_inside(folder, record.file)
    try:
        for first in range(0, record.num_bytes, _PIECE):
            yield os.pread(descriptor, min(_PIECE, record.num_bytes - first), record.offset + first)
    finally:
        os.close(descriptor)
