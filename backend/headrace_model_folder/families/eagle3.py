"""EAGLE-3 heads as people publish them: a decoder layer that drafts for one model, its target.

Owns what config.json says of a head, in the two forms that there are: a Llama's fields with the
head's own beside them or in `eagle_config` (SafeAILab, SGLang, NVIDIA), and the same in
`transformer_layer_config` (speculators). A head is no model: what it computes from is the target's
residual stream, entering three of its layers.

    streams entering 3 layers --(norms)--fusion--> state --hidden_norm-+
    embedding of the next token --input_layernorm----------------------+-> layer -> norm -> output

EAGLE 3.1 norms the streams, one by one or all together, and goes on with states behind the last
norm. Both are options of a head.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (2025); which fields and names folders have, from vLLM, SGLang and speculators.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace_model_folder.description import Attention, Linear, ModelDescription, Norm
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.families.decoder import MAX_WIDTH, Sizes, Switches, decoder, read_sizes, read_window
from headrace_model_folder.families.layer_types import FULL, read_sliding
from headrace_model_folder.fields import Fields

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_DEFAULTS = {"max_position_embeddings": 2048}
_LAYER_KINDS = ("llama", "qwen3")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MOST_STREAMS = 16
_USUAL_STREAMS = 3
_MOST_LAYERS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Eagle3Head:
    """A head's parts, with sizes and the names of their tensors."""

    # Embedding (which a folder may leave to the target), the one layer, norm and output layer. The
    # layer's queries, keys and values have twice as many inputs as the residual stream. The
    # vocabulary is the target's.
    model: ModelDescription
    # Norm of the state in front of the layer.
    hidden_norm: Norm
    # From the target's streams, side by side, to the state.
    fusion: Linear
    # Norms of the streams before that: none, one of all side by side, or one of each.
    stream_norms: tuple[Norm, ...]
    # Elements of the target's residual stream.
    target_hidden_size: int
    # Tokens that the output layer knows; they are some of the target's.
    draft_vocab_size: int
    # Whether the layer adds to the normed state instead of the state.
    norms_residual: bool
    # Whether the state of a draft is behind the last norm, and not before it.
    norms_output: bool
    # The target's layers whose entering streams are fused, as config.json names them; None: the
    # usual ones, by the target's depth.
    stated_layers: tuple[int, ...] | None

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.model.vocab_size

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target of `num_layers` whose entering streams are fused."""
        return self.stated_layers or usual_layers(num_layers)


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Layers that heads are trained on where nothing else is said: early, middle and late."""
    return 2, num_layers // 2, num_layers - 3


def is_eagle3(values: dict[str, Any]) -> bool:
    """Whether a parsed config.json is a head's."""
    names = values.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES


def parse_eagle3(name: str, values: dict[str, Any]) -> Eagle3Head:
    """Makes the description of a head.

    Args:
        name: File that messages name.
        values: The parsed config.json.

    Raises:
        InvalidModelFolder: The architecture is another one, or a field is missing, out of range or
            asks for what is not supported.
    """
    if not is_eagle3(values):
        known, found = ", ".join(ARCHITECTURES), values.get("architectures")
        # The list of one that folders have, as what it names.
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
        raise InvalidModelFolder(f"{name}: architectures of an EAGLE-3 head name one of {known}, found {shown(found)}")
    fields = _flat(name, values)
    _refuse_unsupported(fields)
    sizes = read_sizes(fields)
    if sizes.num_layers != 1:
        raise fields.error("num_hidden_layers", f"of an EAGLE-3 head must be 1, is {sizes.num_layers}")
    target_size = fields.integer("target_hidden_size", 1, MAX_WIDTH, sizes.hidden_size)
    stated = _stated_layers(fields)
    num_streams = len(stated) if stated else _USUAL_STREAMS
    return Eagle3Head(
        model=_described(fields, sizes),
        hidden_norm=Norm("layers.0.hidden_norm", sizes.hidden_size, sizes.norm_eps),
        fusion=Linear("fc", sizes.hidden_size, num_streams * target_size),
        stream_norms=_stream_norms(fields, num_streams, target_size, sizes.norm_eps),
        target_hidden_size=target_size,
        draft_vocab_size=fields.integer("draft_vocab_size", 1, sizes.vocab_size, sizes.vocab_size),
        # Where speculators' form says nothing, heads were trained so.
        norms_residual=fields.boolean("norm_before_residual", _is_nested(fields)),
        norms_output=_switch(fields, "norm_output") or _switch(fields, "return_hidden_post_norm"),
        stated_layers=stated,
    )


def _flat(name: str, values: dict[str, Any]) -> Fields:
    """The fields of both forms in one object."""
    inner = values.get("transformer_layer_config", {})
    if not isinstance(inner, dict):
        raise InvalidModelFolder(f"{name}: transformer_layer_config must be an object, is {shown(inner)}")
    return Fields(name, {**_DEFAULTS, **inner, **values})


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "is not read for an EAGLE-3 head, whose weights must be plain")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", f"must be 'silu', is {shown(fields.get('hidden_act'))}")
    if not _eagle_config(fields).boolean("use_aux_hidden_state", True):
        raise fields.error("eagle_config", "has use_aux_hidden_state false: a head that fuses no streams is not read")


def _eagle_config(fields: Fields) -> Fields:
    inner = fields.get("eagle_config")
    if inner is not None and not isinstance(inner, dict):
        raise fields.error("eagle_config", f"must be an object, is {shown(inner)}")
    return Fields(f"{fields.name}: eagle_config", inner or {})


def _is_nested(fields: Fields) -> bool:
    return fields.get("transformer_layer_config") is not None


def _switch(fields: Fields, name: str) -> bool:
    """A switch that stands in `eagle_config` or beside it; False where it does not.

    Raises:
        InvalidModelFolder: It is neither true nor false, or both places differ.
    """
    nested = _eagle_config(fields)
    found = {place.boolean(name, False) for place in (fields, nested) if place.get(name) is not None}
    if len(found) > 1:
        raise fields.error(name, "is not the same in eagle_config and beside it")
    return found == {True}


def _stream_norms(fields: Fields, num_streams: int, size: int, eps: float) -> tuple[Norm, ...]:
    """Norms of the target's streams, under the names that vLLM gives them."""
    of_all, of_each = _switch(fields, "norm_before_fc"), _switch(fields, "fc_norm")
    if of_all and of_each:
        raise fields.error("fc_norm", "is true, and so is norm_before_fc: streams are normed in one way")
    if of_all:
        return (Norm("input_norm", num_streams * size, eps),)
    return tuple(Norm(f"fc_norm.{place}", size, eps) for place in range(num_streams)) if of_each else ()


def _stated_layers(fields: Fields) -> tuple[int, ...] | None:
    """Layers whose entering streams are fused.

    A field of its own counts layers as vLLM does: j is the stream that enters layer j. In
    `eagle_config` it counts as SGLang does: j is the stream that leaves layer j. An empty list says
    nothing. A fourth layer in speculators' form is the one whose output the head was trained on.
    """
    if fields.get(_LAYER_IDS):
        stated = _layer_list(fields)
        return stated[:_USUAL_STREAMS] if _is_nested(fields) and len(stated) == _USUAL_STREAMS + 1 else stated
    nested = _eagle_config(fields)
    return tuple(layer + 1 for layer in _layer_list(nested)) if nested.get(_LAYER_IDS) else None


def _layer_list(fields: Fields) -> tuple[int, ...]:
    stated = fields.get(_LAYER_IDS)
    if not isinstance(stated, list) or not 1 <= len(stated) <= _MOST_STREAMS:
        raise fields.error(_LAYER_IDS, f"must be a list of 1 to {_MOST_STREAMS} layers, is {shown(stated)}")
    numbered = Fields(f"{fields.name}: {_LAYER_IDS}", {str(place): layer for place, layer in enumerate(stated)})
    return tuple(numbered.integer(str(place), 0, _MOST_LAYERS) for place in range(len(stated)))


def _described(fields: Fields, sizes: Sizes) -> ModelDescription:
    """A Llama of one layer, under the names that heads have, whose attention reads two vectors.

    In speculators' form it may be a layer of Qwen3, whose queries and keys are normed.
    """
    bias = fields.boolean("attention_bias", False)
    switches = Switches(bias, bias, fields.boolean("mlp_bias", False), _layer_kind(fields) == "qwen3")
    model = decoder(sizes, [_window(fields)], switches, prefix="")
    [layer] = model.layers
    layer = dataclasses.replace(layer, attention=_reading_both(layer.kv_attention))
    head = dataclasses.replace(model.head, tied=False)
    return dataclasses.replace(model, layers=(layer,), head=head)


def _layer_kind(fields: Fields) -> str:
    inner = fields.get("transformer_layer_config") or {}
    kind = inner.get("model_type", "llama")
    if kind not in _LAYER_KINDS:
        raise fields.error(
            "transformer_layer_config", f"must have model_type {' or '.join(_LAYER_KINDS)}, has {shown(kind)}"
        )
    return str(kind)


def _window(fields: Fields) -> int | None:
    """Tokens that the layer sees; None: all, unless `layer_types` says otherwise.

    That list may be the target's, with as many entries, where none of them has a window.
    """
    types = fields.get("layer_types")
    if isinstance(types, list) and set(map(str, types)) <= {FULL}:
        return None
    return read_window(fields) if read_sliding(fields, 1) == [True] else None


def _reading_both(attention: Attention) -> Attention:
    query, key, value = (dataclasses.replace(part, inputs=2 * part.inputs) for part in attention.projected)
    return dataclasses.replace(attention, query=query, key=key, value=value)
