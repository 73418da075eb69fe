"""A model folder, opened: everything that can be known and refused before torch is imported.

Owns the order of checks, the revision and the sums. Reads headers and small files only (and the order of inputs where a quantization has one), so that opening takes milliseconds whatever the weights' size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Self

from headrace_model_folder.bounded_files import exists_inside, read_bytes
from headrace_model_folder.chat_template import ChatTemplate, read_chat_template
from headrace_model_folder.config import CONFIG_FILE, ModelConfig, read_config
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.expected_tensors import check_tensors, parameter_count
from headrace_model_folder.generation_defaults import GenerationDefaults, read_generation_defaults
from headrace_model_folder.input_orders import with_input_orders
from headrace_model_folder.safetensors_header import TensorRecord
from headrace_model_folder.tensor_index import TensorIndex, read_tensor_index
from headrace_model_folder.token_table import TOKENIZER_FILE, TOKENIZER_LIMIT, TokenTable, parse_token_table

_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFolder:
    """A valid model folder. Made by `open`."""

    path: pathlib.Path
    config: ModelConfig
    generation_defaults: GenerationDefaults
    # Name -> place in a file; empty if opened without weights.
    tensors: Mapping[str, TensorRecord]
    # "name@" and 12 hexadecimal digits that change with config, tokenizer, tensor headers and sizes.
    revision: str
    template: ChatTemplate
    # None if the folder has no tokenizer.json.
    tokenizer_path: pathlib.Path | None
    token_table: TokenTable | None
    parameter_count: int

    @classmethod
    def open(cls, path: pathlib.Path | str, require_weights: bool = True) -> Self:
        """Opens and validates a folder.

        Args:
            path: The folder.
            require_weights: False for dummy weights: then no safetensors file is looked for.

        Raises:
            InvalidModelFolder: one line naming the file and what is wrong in it.
        """
        folder = _existing_folder(path)
        config = read_config(folder)
        defaults = read_generation_defaults(folder, config.vocab_size, config.eos_token_ids)
        index = read_tensor_index(folder) if require_weights else TensorIndex({}, {})
        if require_weights:
            check_tensors(config, index.tensors)
            config = with_input_orders(folder, config, index.tensors)
        tokenizer = (
            read_bytes(folder, TOKENIZER_FILE, TOKENIZER_LIMIT) if exists_inside(folder, TOKENIZER_FILE) else None
        )
        return cls(
            path=folder,
            config=config,
            generation_defaults=defaults,
            tensors=index.tensors,
            revision=_revision(folder, tokenizer, index),
            template=read_chat_template(folder),
            tokenizer_path=None if tokenizer is None else folder / TOKENIZER_FILE,
            token_table=None if tokenizer is None else _checked_table(tokenizer, config.vocab_size),
            parameter_count=parameter_count(config),
        )

    @property
    def name(self) -> str:
        """The folder's own name, the default name of the model."""
        return self.path.name

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template; None if the model has none."""
        return self.template.source

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights in `dtype` (fp32, bf16, fp16, or torch's spelling)."""
        return self.parameter_count * _DTYPE_BYTES[dtype]


def _existing_folder(path: pathlib.Path | str) -> pathlib.Path:
    folder = pathlib.Path(path)
    try:
        resolved = folder.resolve()
        if not resolved.exists():
            raise InvalidModelFolder(f"{folder}: no such model folder")
        if not resolved.is_dir():
            raise InvalidModelFolder(f"{folder}: is not a folder")
        next(resolved.iterdir(), None)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, InvalidModelFolder):
            raise
        raise InvalidModelFolder(f"{folder}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    return resolved


def _checked_table(tokenizer: bytes, vocab_size: int) -> TokenTable:
    table = parse_token_table(tokenizer)
    if len(table.token_bytes) > vocab_size:
        beyond = len(table.token_bytes) - 1
        text = (table.token_bytes[beyond] or b"").decode("utf-8", "replace")
        raise InvalidModelFolder(
            f"{TOKENIZER_FILE}: token {shown(text)} has id {beyond}, {CONFIG_FILE} has vocab_size {vocab_size}"
        )
    return table


def _revision(folder: pathlib.Path, tokenizer: bytes | None, index: TensorIndex) -> str:
    digest = hashlib.sha256()
    parts = [read_bytes(folder, CONFIG_FILE, 1 << 30), tokenizer or b""]
    for file, header in sorted(index.headers.items()):
        parts += [file.encode(), header.file_size.to_bytes(8, "little"), header.raw]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"{folder.name}@{digest.hexdigest()[:12]}"
