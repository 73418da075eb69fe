"""A model folder, opened: everything that can be known and refused before torch is imported.

Owns the order of checks, the revision and the sums. Reads headers, small files and samples of the
weights only (and the order of inputs where a quantization has one), so that opening takes
milliseconds whatever the weights' size.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Self

from headrace_model_folder import revisions
from headrace_model_folder.bounded_files import exists_inside, read_bytes
from headrace_model_folder.chat_template import ChatTemplate, read_chat_template
from headrace_model_folder.config import CONFIG_FILE, ModelConfig, read_config
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.expected_tensors import check_tensors, parameter_count, untied_where_different
from headrace_model_folder.families.registry import FAMILIES
from headrace_model_folder.formats.bitsandbytes_tensors import joined_nf4
from headrace_model_folder.formats.expert_formats import refuse_ordered_experts, without_plain
from headrace_model_folder.formats.input_orders import with_input_orders
from headrace_model_folder.formats.input_scales import with_input_scales
from headrace_model_folder.fused_tensors import split_fused
from headrace_model_folder.generation_defaults import GenerationDefaults, read_generation_defaults
from headrace_model_folder.gguf.config import read_gguf_config
from headrace_model_folder.gguf.files import find_gguf
from headrace_model_folder.gguf.header import read_gguf_header
from headrace_model_folder.gguf.tensors import gguf_records, shared_blocks
from headrace_model_folder.gguf.tokenizer import gguf_chat_template, gguf_tokenizer_json
from headrace_model_folder.safetensors_header import TensorRecord
from headrace_model_folder.stacked_experts import split_joined, split_stacked
from headrace_model_folder.tensor_index import TensorIndex, read_tensor_index, tensor_names
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
    # "name@" and 12 hexadecimal digits that change with config, tokenizer, tensor headers, sizes
    # and samples of the weights.
    revision: str
    template: ChatTemplate
    # None if the folder has no tokenizer.json.
    tokenizer_path: pathlib.Path | None
    # None too if opened without the tokens.
    token_table: TokenTable | None
    parameter_count: int
    # Of all of the model in one GGUF file; None for a folder.
    gguf_file: str | None = None

    @classmethod
    def open(cls, path: pathlib.Path | str, require_weights: bool = True, reads_tokens: bool = True) -> Self:
        """Opens and validates a folder.

        Args:
            path: The folder, or a GGUF file, or a folder with one and without a config.json.
            require_weights: False for dummy weights: then no safetensors file is looked for.
            reads_tokens: False where ids of tokens are all that counts, and another process has
                checked the tokenizer: a table of 128,000 tokens takes 0.2 s of a core.

        Raises:
            InvalidModelFolder: one line naming the file and what is wrong in it.
        """
        if (gguf := find_gguf(path)) is not None:
            return cls._open_gguf(*gguf, require_weights, reads_tokens)
        folder = _existing_folder(path)
        config = read_config(folder)
        defaults = read_generation_defaults(
            folder, config.vocab_size, config.max_position_embeddings, config.eos_token_ids
        )
        index = read_tensor_index(folder) if require_weights else TensorIndex({}, {})
        tensors: Mapping[str, TensorRecord] = index.tensors
        family = FAMILIES[config.architecture]
        if family.text_part is not None:
            tensors = family.text_part.tensors(tensors)
        if require_weights and config.is_bitsandbytes:
            tensors = joined_nf4(folder, tensors)
        if require_weights:
            tensors = split_joined(config, tensors)
            config = untied_where_different(folder, config, tensors)
            config = _with_plain_logits(config, tensors)
            check_tensors(config, tensors)
            tensors = split_stacked(config, split_fused(folder, config, tensors))
            config = with_inputs(folder, config, tensors)
        tokenizer = (
            read_bytes(folder, TOKENIZER_FILE, TOKENIZER_LIMIT) if exists_inside(folder, TOKENIZER_FILE) else None
        )
        read = tokenizer if reads_tokens else None
        return cls(
            path=folder,
            config=config,
            generation_defaults=defaults,
            tensors=tensors,
            revision=revisions.of_folder(folder, tokenizer, index),
            template=read_chat_template(folder),
            tokenizer_path=None if tokenizer is None else folder / TOKENIZER_FILE,
            token_table=None if read is None else _checked_table(read, config.vocab_size),
            parameter_count=parameter_count(config),
        )

    @classmethod
    def _open_gguf(cls, folder: pathlib.Path, file: str, require_weights: bool, reads_tokens: bool) -> Self:
        """`open` for a GGUF file. Its tokenizer is in it, so there is no `tokenizer_path`."""
        header = read_gguf_header(folder, file)
        config = read_gguf_config(folder, header)
        records = gguf_records(folder, header, config)
        config = dataclasses.replace(config, shared_blocks=shared_blocks(header, config))
        tokenizer = gguf_tokenizer_json(file, header.metadata, config.vocab_size) if reads_tokens else None
        return cls(
            path=folder / file,
            config=config,
            generation_defaults=GenerationDefaults(eos_token_ids=config.eos_token_ids),
            tensors=records if require_weights else {},
            revision=revisions.of_gguf(folder, file, header.digest),
            template=gguf_chat_template(file, header.metadata),
            tokenizer_path=None,
            token_table=None if tokenizer is None else _gguf_table(tokenizer, config.vocab_size, file),
            parameter_count=parameter_count(config),
            gguf_file=file,
        )

    @property
    def name(self) -> str:
        """The folder's or file's own name, the default name of the model."""
        return self.path.name if self.gguf_file is None else self.path.stem

    @property
    def weights_folder(self) -> pathlib.Path:
        """The folder that the tensors' files are in."""
        return self.path if self.gguf_file is None else self.path.parent

    @property
    def tokenizer_name(self) -> str:
        """What the tokenizer would be found in."""
        return TOKENIZER_FILE if self.gguf_file is None else "tokenizer.ggml.model"

    def tokenizer_json(self) -> bytes:
        """The tokenizer as tokenizer.json has it; read anew, as it is large.

        Only where there is a `token_table`.

        Raises:
            InvalidModelFolder: the file has gone or changed.
        """
        assert self.token_table is not None
        if self.gguf_file is None:
            return read_bytes(self.path, TOKENIZER_FILE, TOKENIZER_LIMIT)
        metadata = read_gguf_header(self.path.parent, self.gguf_file).metadata
        made = gguf_tokenizer_json(self.gguf_file, metadata, self.config.vocab_size)
        if made is None:
            raise InvalidModelFolder(f"{self.gguf_file}: has no tokenizer any more")
        return made

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template; None if the model has none."""
        return self.template.source

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights in `dtype` (fp32, bf16, fp16, or torch's spelling)."""
        return self.parameter_count * _DTYPE_BYTES[dtype]


def has_own_output_layer(folder: pathlib.Path, config: ModelConfig) -> bool:
    """Whether the weights have an output layer of their own, though config.json ties it.

    False where there are no weights. Where there is an index and not all of its shards, an output
    layer that it names is taken for one of its own.
    """
    head, part = config.description.head, FAMILIES[config.architecture].text_part
    try:
        names = tensor_names(folder) if head.tied else frozenset[str]()
    except InvalidModelFolder:
        return False
    if f"{head.name}.weight" not in (names if part is None else map(part.own_name, names)):
        return False
    try:
        tensors: Mapping[str, TensorRecord] = read_tensor_index(folder).tensors
        tensors = tensors if part is None else part.tensors(tensors)
        return not untied_where_different(folder, config, tensors).description.head.tied
    except InvalidModelFolder:
        return True


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


def _with_plain_logits(config: ModelConfig, tensors: Mapping[str, TensorRecord]) -> ModelConfig:
    """Returns the config with routers and gates plain that the folder has so, whatever it says."""
    if config.quantization is None:
        return config
    kept = [linear.name for linear in config.description.linears if linear.keeps_dtype]
    layers = without_plain(kept, config.quantization.layers, tensors)
    return dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, layers=layers))


def with_inputs(folder: pathlib.Path, config: ModelConfig, tensors: Mapping[str, TensorRecord]) -> ModelConfig:
    """Returns the config with what the folder's tensors say of the inputs of quantized layers.

    Raises:
        InvalidModelFolder: File, tensor and rule are named.
    """
    if config.quantization is None:
        return config
    quantization = with_input_orders(folder, config.quantization, tensors)
    refuse_ordered_experts(config.description.expert_products, quantization.layers)
    return dataclasses.replace(config, quantization=with_input_scales(folder, quantization, tensors))


def _checked_table(tokenizer: bytes, vocab_size: int) -> TokenTable:
    table = parse_token_table(tokenizer)
    if len(table.token_bytes) > vocab_size:
        beyond = len(table.token_bytes) - 1
        text = (table.token_bytes[beyond] or b"").decode("utf-8", "replace")
        raise InvalidModelFolder(
            f"{TOKENIZER_FILE}: token {shown(text)} has id {beyond}, {CONFIG_FILE} has vocab_size {vocab_size}"
        )
    return table


def _gguf_table(tokenizer: bytes, vocab_size: int, file: str) -> TokenTable:
    try:
        return _checked_table(tokenizer, vocab_size)
    except InvalidModelFolder as error:
        raise InvalidModelFolder(f"{file}: vocabulary, as tokenizer.json: {error}") from None
