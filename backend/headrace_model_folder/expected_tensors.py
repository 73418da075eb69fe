"""Which tensors an architecture needs, by Hugging Face name and shape, and the comparison with what
a folder has.

All four families share one skeleton; biases, query/key norms and tied embeddings are the config's
switches. Where another tool quantized a layer, the tensors of its format stand in the folder in
place of its weight (`formats.layer_format`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headrace_model_folder.config import ModelConfig
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.safetensors_header import TensorRecord

Shape = tuple[int, ...]

LM_HEAD = "lm_head.weight"
WEIGHT_DTYPES = ("F32", "F16", "BF16")
# Old checkpoints carry the rotary frequencies, which follow from the config.
_TOLERATED = re.compile(r"model\.(layers\.\d{1,4}\.self_attn\.)?rotary_emb\.inv_freq")


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor of the model, weights as [out, in].

    `lm_head.weight` is absent if embeddings are tied.
    """
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors.update((prefix + name, shape) for name, shape in _layer_tensors(config))
    tensors["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return tensors


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model; tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


class _Expected(NamedTuple):
    """A tensor of a folder: any of these shapes and types."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = WEIGHT_DTYPES
    is_required: bool = True


def check_tensors(config: ModelConfig, found: Mapping[str, TensorRecord]) -> None:
    """Compares a folder's tensors with the expected ones.

    Raises:
        InvalidModelFolder: a tensor is missing, misshapen, of a dtype that can't be loaded, or
            surplus; or a layer's sizes do not suit its format.
    """
    expected = _folder_tensors(config)
    for name, wanted in expected.items():
        if name in found:
            _check_record(name, wanted, found[name])
        elif wanted.is_required:
            raise InvalidModelFolder(f"{_likely_file(name, found)}: tensor {shown(name)} is missing{_why(config)}")
    for name, record in found.items():
        if name not in expected and not _TOLERATED.fullmatch(name):
            raise InvalidModelFolder(
                f"{record.file}: tensor {shown(name)} is surplus: {config.architecture} with this config.json has none"
            )


def _folder_tensors(config: ModelConfig) -> dict[str, _Expected]:
    """What a folder holds, with what it may hold."""
    tensors = expected_tensors(config)
    layers = config.quantization.layers if config.quantization else {}
    expected: dict[str, _Expected] = {}
    for name, shape in tensors.items():
        form = layers.get(name.removesuffix(".weight"))
        if form is None or not name.endswith(".weight"):
            expected[name] = _Expected((shape,))
            continue
        layer = name.removesuffix(".weight")
        form.check_sizes(layer, *shape)
        for tensor in form.tensors(*shape):
            expected[f"{layer}.{tensor.suffix}"] = _Expected(tensor.shapes, tensor.dtypes, tensor.is_required)
    expected.update((name, _Expected((shape,), is_required=False)) for name, shape in needless_biases(config).items())
    if config.tie_word_embeddings:
        expected[LM_HEAD] = _Expected(((config.vocab_size, config.hidden_size),), is_required=False)
    return expected


def needless_biases(config: ModelConfig) -> dict[str, Shape]:
    """Biases that a folder may have though the architecture has none: tools for GPTQ and AWQ write
    zeros for each layer that they quantize.
    """
    if config.quantization is None or config.quantization.method not in ("gptq", "awq"):
        return {}
    tensors = expected_tensors(config)
    biases = {f"{layer}.bias": tensors[f"{layer}.weight"][:1] for layer in config.quantization.layers}
    return {name: shape for name, shape in biases.items() if name not in tensors}


def _check_record(name: str, wanted: _Expected, record: TensorRecord) -> None:
    if record.shape not in wanted.shapes:
        shapes = " or ".join(str(list(shape)) for shape in wanted.shapes)
        raise InvalidModelFolder(
            f"{record.file}: tensor {shown(name)} has shape {list(record.shape)}, {shapes} expected from config.json"
        )
    if record.dtype not in wanted.dtypes and (record.nf4 is None or ".layers." not in name):
        raise InvalidModelFolder(
            f"{record.file}: tensor {shown(name)} has dtype {record.dtype}, one of {', '.join(wanted.dtypes)} expected"
        )


def _why(config: ModelConfig) -> str:
    method = config.quantization and config.quantization.method
    return f", which quantization_config ({method}) in config.json asks for" if method else ""


def _likely_file(name: str, found: Mapping[str, TensorRecord]) -> str:
    """The file to name for a missing tensor: the only one, the one with its neighbours, or any."""
    prefix = name.rsplit(".", 3)[0]
    files = [record.file for other, record in found.items() if other.startswith(prefix)] or [
        r.file for r in found.values()
    ]
    return files[0] if files else "model.safetensors"


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield from _linear("self_attn.q_proj", query, hidden, config.attention_bias)
    yield from _linear("self_attn.k_proj", key, hidden, config.attention_bias)
    yield from _linear("self_attn.v_proj", key, hidden, config.attention_bias)
    yield from _linear("self_attn.o_proj", hidden, query, config.attention_output_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield from _linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, config.mlp_bias)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
