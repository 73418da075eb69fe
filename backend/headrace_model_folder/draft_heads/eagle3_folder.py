"""The folder of an EAGLE-3 head, opened: what can be known and refused of it before torch is there.

Owns the names that its tensors have (`midlayer.` or `layers.0.`, with or without `model.`), which
of them must be there, and the way from the head's reduced vocabulary to its target's. Whether it
suits a target is the backend's (`draft_rules`).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Self

from headrace_model_folder import revisions
from headrace_model_folder.bounded_files import MIB, read_json_object
from headrace_model_folder.description import Linear, Norm, Shape
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.families.eagle3 import Eagle3Head, parse_eagle3
from headrace_model_folder.safetensors_header import TensorRecord, read_tensor
from headrace_model_folder.tensor_index import TensorIndex, read_tensor_index

_CONFIG_FILE = "config.json"
_CONFIG_LIMIT = 4 * MIB
_WEIGHT_DTYPES = ("F32", "F16", "BF16")
# Which of the target's tokens each of the head's is, as the difference of their ids; and which of
# the target's tokens the head has, which follows from that.
_TO_TARGET, _TO_DRAFT = "d2t", "t2d"
# Follows from config.json; old folders carry it.
_FREQUENCIES = ("layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")


@dataclasses.dataclass(frozen=True, slots=True)
class Eagle3Folder:
    """A valid folder of a head. Made by `open`."""

    path: pathlib.Path
    head: Eagle3Head
    # Name in the description -> place in a file; empty if opened without weights.
    tensors: Mapping[str, TensorRecord]
    # The target's id of each of the head's tokens.
    target_ids: tuple[int, ...]
    # As a model folder's; empty where no folder was opened.
    revision: str = ""

    @classmethod
    def open(cls, path: pathlib.Path | str, require_weights: bool = True) -> Self:
        """Opens and validates a head's folder.

        Args:
            path: The folder.
            require_weights: False for seeded weights: then no safetensors file is looked for, and
                the head's tokens are the target's first ones.

        Raises:
            InvalidModelFolder: One line naming the file and what is wrong in it.
        """
        folder = pathlib.Path(path)
        if not folder.is_dir():
            raise InvalidModelFolder(f"{folder}: {'is not a folder' if folder.exists() else 'no such folder'}")
        folder = folder.resolve()
        head = parse_eagle3(_CONFIG_FILE, read_json_object(folder, _CONFIG_FILE, _CONFIG_LIMIT))
        index = read_tensor_index(folder) if require_weights else TensorIndex({}, {})
        revision = revisions.of_folder(folder, None, index)
        if not require_weights:
            return cls(folder, head, {}, tuple(range(head.draft_vocab_size)), revision)
        found = _named(index.tensors)
        _check(head, found)
        return cls(folder, head, found, _target_ids(folder, head, found.get(_TO_TARGET)), revision)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.name

    @property
    def weights_folder(self) -> pathlib.Path:
        """The folder that the tensors' files are in."""
        return self.path

    @property
    def has_output_layer(self) -> bool:
        """Whether the head has an output layer of its own; else it takes the target's."""
        return not self.tensors or f"{self.head.model.head.name}.weight" in self.tensors

    @property
    def has_embedding(self) -> bool:
        """Whether the head has an embedding of its own; else it takes the target's."""
        return f"{self.head.model.embedding.name}.weight" in self.tensors


def _named(tensors: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """The tensors by the names of the description."""
    named: dict[str, TensorRecord] = {}
    for found, record in tensors.items():
        name = found.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        if name in named:
            raise InvalidModelFolder(f"{record.file}: tensor {shown(found)} is there under two names")
        named[name] = record
    return named


def _check(head: Eagle3Head, found: Mapping[str, TensorRecord]) -> None:
    """Raises InvalidModelFolder for a tensor that is missing, misshapen or surplus."""
    expected = weight_shapes(head)
    optional = {name for name, _ in head.model.embedding.tensors()}
    output_layer = f"{head.model.head.name}.weight"
    if head.draft_vocab_size == head.vocab_size and optional.isdisjoint(found):
        # As SGLang has it: a head without either takes both from its target.
        optional.add(output_layer)
    maps: dict[str, tuple[Shape, tuple[str, ...]]] = {
        _TO_TARGET: ((head.draft_vocab_size,), ("I64", "I32")),
        _TO_DRAFT: ((head.vocab_size,), ("BOOL", "U8", "I8", "I64", "I32")),
    }
    for name in expected:
        if name not in found and name not in optional:
            raise InvalidModelFolder(f"tensor {shown(name)} is missing")
    for name, record in found.items():
        if name in _FREQUENCIES:
            continue
        if name not in expected and name not in maps:
            raise InvalidModelFolder(f"{record.file}: tensor {shown(name)} is surplus: such a head has none")
        shape, dtypes = maps[name] if name in maps else (expected[name], _WEIGHT_DTYPES)
        if record.shape != shape:
            raise InvalidModelFolder(
                f"{record.file}: tensor {shown(name)} has shape {list(record.shape)}, {list(shape)} expected from "
                f"{_CONFIG_FILE}"
            )
        if record.dtype not in dtypes:
            raise InvalidModelFolder(
                f"{record.file}: tensor {shown(name)} has dtype {record.dtype}, one of {', '.join(dtypes)} expected"
            )


def weight_shapes(head: Eagle3Head) -> dict[str, Shape]:
    """Name -> shape of every weight that a head may have, the embedding among them."""
    shapes: dict[str, Shape] = dict(head.model.tensors())
    shapes[f"{head.model.head.name}.weight"] = (head.draft_vocab_size, head.model.hidden_size)
    parts: tuple[Norm | Linear, ...] = (head.hidden_norm, head.fusion, *head.stream_norms)
    for part in parts:
        shapes |= dict(part.tensors())
    return shapes


def _target_ids(folder: pathlib.Path, head: Eagle3Head, record: TensorRecord | None) -> tuple[int, ...]:
    """The target's id of each of the head's tokens, as `d2t` says."""
    if record is None:
        if head.draft_vocab_size < head.vocab_size:
            raise InvalidModelFolder(
                f"tensor '{_TO_TARGET}' is missing: draft_vocab_size is {head.draft_vocab_size} and vocab_size is "
                f"{head.vocab_size}"
            )
        return tuple(range(head.vocab_size))
    differences = memoryview(read_tensor(folder, _TO_TARGET, record)).cast("q" if record.dtype == "I64" else "i")
    ids = tuple(own + difference for own, difference in enumerate(differences))
    for own, target in enumerate(ids):
        if not 0 <= target < head.vocab_size:
            raise InvalidModelFolder(
                f"{record.file}: tensor '{_TO_TARGET}' makes token {own} of the head token {target} of the model, "
                f"which has {head.vocab_size}"
            )
    if len(set(ids)) < len(ids):
        raise InvalidModelFolder(f"{record.file}: tensor '{_TO_TARGET}' makes two tokens of the head the same one")
    return ids
