"""config.json as a frozen dataclass: the architecture's sizes and switches, with the family's own
defaults and bounds that keep absurd values out.

Owns which architectures and variants exist here. Does not know tensors (`expected_tensors`) nor how
anything is computed (the worker's models). Code of the folder's own (`auto_map`) is never run, only
mentioned; what the fields mean is decided by the architecture's name alone.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

from headrace_model_folder.bounded_files import MIB, read_json_object
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.formats.bitsandbytes_tensors import GROUP, refuse_other_bitsandbytes
from headrace_model_folder.formats.quantization_config import BITSANDBYTES, FolderQuantization, read_quantization
from headrace_model_folder.rope_config import RopeConfig, read_rope

CONFIG_FILE = "config.json"
_CONFIG_LIMIT = 4 * MIB

DType = Literal["bfloat16", "float16", "float32"]

# What `transformers` assumes for a field that config.json leaves out, where families differ.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
ARCHITECTURES = tuple(_FAMILY_DEFAULTS)

# Far above any model that exists; they keep a hostile file from making us build billions of names
# or overflow a size.
_MAX_LAYERS = 1024
_MAX_HEADS = 1024
_MAX_HEAD_DIM = 1024
_MAX_WIDTH = 1 << 20
_MAX_VOCAB = 1 << 22
_MAX_CONTEXT = 1 << 26


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Sizes in elements, positions in tokens."""

    # Hugging Face class name, one of ARCHITECTURES.
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    # Usable context: the stated one, or what YaRN stretches it to.
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    # Bias on the query, key and value projections.
    attention_bias: bool
    # Bias on the attention's output projection.
    attention_output_bias: bool
    mlp_bias: bool
    # RMS norm over each head's query and key, before the rotation.
    qk_norm: bool
    # Largest window of any layer; None if every layer sees the whole context.
    sliding_window: int | None
    # [num_layers] each layer's window: a token sees itself and window - 1 before it. None: all
    # before it.
    layer_windows: tuple[int | None, ...]
    torch_dtype: DType
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    # What another tool made of the layers' weights; None: they are plain, bitsandbytes', or a GGUF
    # file's.
    quantization: FolderQuantization | None = None
    # Whether bitsandbytes quantized the folder's weights: which ones, their tensors say.
    is_bitsandbytes: bool = False
    # Inputs of attention's output and of the down projection that lie in one block, of bitsandbytes
    # or of a GGUF file's types; 1: they are in none.
    shared_blocks: tuple[int, int] = (1, 1)
    # Whether config.json names code of the folder's own, which is never run.
    names_own_code: bool = False

    @property
    def attention_window(self) -> int | None:
        """Tokens that a token sees in every layer, itself included; None: all before it."""
        return min(filter(None, self.layer_windows), default=None)

    @property
    def quantized_by(self) -> str | None:
        """Who quantized the folder's weights, as config.json spells it; None: nobody, or a GGUF
        file's maker.
        """
        if self.quantization is not None:
            return self.quantization.method
        return BITSANDBYTES if self.is_bitsandbytes else None


def read_config(folder: pathlib.Path) -> ModelConfig:
    """Reads and validates config.json.

    Raises InvalidModelFolder naming the field, the rule and the value.
    """
    return parse_config(read_json_object(folder, CONFIG_FILE, _CONFIG_LIMIT))


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """The config of a parsed config.json.

    Raises InvalidModelFolder naming the field, the rule and the value.
    """
    architecture = _architecture(values)
    stated = Fields(CONFIG_FILE, values)
    _refuse_unsupported(stated)
    defaults = _FAMILY_DEFAULTS[architecture]
    # A null in the file means null (Mistral: no window), so the defaults only fill what is absent.
    fields = Fields(CONFIG_FILE, {**defaults, **values})
    num_layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
    hidden_size = fields.integer("hidden_size", 1, _MAX_WIDTH)
    vocab_size = fields.integer("vocab_size", 1, _MAX_VOCAB)
    max_position = fields.integer("max_position_embeddings", 1, _MAX_CONTEXT)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    rope = read_rope(fields, max_position, head_dim)
    biases = _biases(architecture, fields)
    windows = _layer_windows(architecture, fields, num_layers)
    bos = fields.token_ids("bos_token_id", vocab_size)
    is_bitsandbytes = _is_bitsandbytes(fields)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 1, _MAX_WIDTH),
        vocab_size=vocab_size,
        max_position_embeddings=min(max(max_position, rope.stretched_context), _MAX_CONTEXT),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=biases[0],
        attention_output_bias=biases[1],
        mlp_bias=biases[2],
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=max((w for w in windows if w is not None), default=None),
        layer_windows=windows,
        torch_dtype=_dtype(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        quantization=None if is_bitsandbytes else read_quantization(fields.get("quantization_config"), num_layers),
        is_bitsandbytes=is_bitsandbytes,
        shared_blocks=(GROUP, GROUP) if is_bitsandbytes else (1, 1),
        names_own_code=_names_own_code(values),
    )


def _architecture(values: dict[str, Any]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        found = names[0] if isinstance(names, list) and names else names
        known = ", ".join(ARCHITECTURES)
        advice = "; code of the folder's own (auto_map) is never run" if _names_own_code(values) else ""
        raise InvalidModelFolder(f"{CONFIG_FILE}: architectures must name one of {known}, is {shown(found)}{advice}")
    return str(names[0])


def _names_own_code(values: dict[str, Any]) -> bool:
    return bool(values.get("auto_map"))


def _refuse_unsupported(fields: Fields) -> None:
    if _is_bitsandbytes(fields):
        refuse_other_bitsandbytes(fields, fields.get("quantization_config"))
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", f"must be 'silu', is {shown(fields.get('hidden_act'))}")


def _is_bitsandbytes(fields: Fields) -> bool:
    settings = fields.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == BITSANDBYTES


def _kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", 1, _MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads}), is {num_kv_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads ({num_heads}), is {hidden_size}")
    head_dim = fields.integer("head_dim", 2, _MAX_HEAD_DIM, hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even, is {head_dim}")
    return head_dim


def _biases(architecture: str, fields: Fields) -> tuple[bool, bool, bool]:
    """Whether query/key/value, the attention's output and the MLP have biases."""
    if architecture == "Qwen2ForCausalLM":
        return True, False, False
    if architecture == "MistralForCausalLM":
        return False, False, False
    attention = fields.boolean("attention_bias", False)
    return attention, attention, architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", False)


def _layer_windows(architecture: str, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    has_window = architecture == "MistralForCausalLM" or fields.boolean("use_sliding_window", False)
    if not has_window or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.integer("sliding_window", 1, _MAX_CONTEXT)
    if architecture == "MistralForCausalLM":
        _refuse_mixed_layers(fields)
        return (window,) * num_layers
    types = fields.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 0, 1 << 30, 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error(
            "layer_types", f"must be a list of num_hidden_layers ({num_layers}) entries, is {shown(types)}"
        )
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"must hold 'full_attention' or 'sliding_attention', has {shown(kind)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _refuse_mixed_layers(fields: Fields) -> None:
    types = fields.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(kind != "sliding_attention" for kind in types)):
        raise fields.error(
            "layer_types", "must be all 'sliding_attention' for MistralForCausalLM with a sliding_window"
        )


def _dtype(fields: Fields) -> DType:
    value = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    for dtype in ("bfloat16", "float16", "float32"):
        if value in (dtype, f"torch.{dtype}"):
            return dtype
    raise fields.error("torch_dtype", f"must be bfloat16, float16 or float32, is {shown(value)}")
