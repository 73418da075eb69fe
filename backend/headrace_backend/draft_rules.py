"""Which models and heads may draft for a model: what can be refused before weights are read.

Owns the rules and their words; supervisor, backend and worker all ask here. A draft model proposes
tokens by their ids and follows its target's sequences to their ends, so both must have the same
vocabulary, and the draft model at least the context of the longest sequence. A head reads its
target's streams, so it must have the target's width and name layers that the target has. How they
propose is `worker.speculation`'s. No torch.

An MTP layer is in the model's own folder, and was trained with it: it must be there, and bear the
bits and the ranks that are configured for the model.
"""

from __future__ import annotations

import dataclasses
import re

from headrace_backend.config import EngineConfig
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_backend.tp_rules import unsuitable_tp
from headrace_model_folder import Eagle3Folder, Eagle3Head, InvalidModelFolder, ModelConfig, ModelFolder, open_mtp

# The setting by which a rule for the model's own weights says what is wrong.
_QUANTIZE = re.compile(r"\bquantize\b")


def unsuitable_draft(config: EngineConfig, target: ModelFolder) -> str | None:
    """Explains why what is configured to draft can't draft for a model; returns None if it can.

    None too where no model or head is. The draft model's or head's folder is opened, and its
    weights are not read.

    Args:
        config: The engine's configuration.
        target: The model that verifies what is drafted.
    """
    if config.speculate == "mtp":
        return _unsuitable_layer(config, target)
    if config.draft_model is None:
        return None
    if config.speculate == "eagle":
        return _unsuitable_head(config, target)
    try:
        draft = ModelFolder.open(config.draft_model, require_weights=config.load == "folder")
    except InvalidModelFolder as error:
        return f"draft_model: {error}"
    reason = (
        _recurrent(draft)
        or _uneven(draft)
        or _other_vocabulary(draft, target)
        or _short_context(config, draft, target)
        or _bits(config, draft)
        or _unshared(config, draft)
    )
    return f"draft_model {draft.name}: {reason}" if reason else None


def draft_revision(config: EngineConfig) -> str:
    """Returns the revision of the draft model or head that is configured; empty if none is.

    Raises:
        InvalidModelFolder: It can't be read.
    """
    if config.draft_model is None:
        return ""
    kind = Eagle3Folder if config.speculate == "eagle" else ModelFolder
    return kind.open(config.draft_model, require_weights=config.load == "folder").revision


def _unsuitable_layer(config: EngineConfig, target: ModelFolder) -> str | None:
    if target.config.mtp is None:
        return unsuitable_mtp(config, target.config)
    try:
        layer = open_mtp(target).config
    except InvalidModelFolder as error:
        return f"speculate is mtp, and the model's folder has no MTP layer that can be read: {error}"
    return unsuitable_mtp(config, dataclasses.replace(target.config, mtp=layer))


def unsuitable_mtp(config: EngineConfig, model: ModelConfig) -> str | None:
    """Explains why a model's MTP layer can't draft for it as configured; returns None if it can.

    None too where it is not to draft. Whether the folder has the layer is not asked here.

    Args:
        config: The engine's configuration.
        model: The model, with what is known of the layer.
    """
    if config.speculate != "mtp":
        return None
    if model.mtp is None:
        return f"speculate is mtp, and {without_mtp(model)}"
    reason = unsuitable_quantization(config, model.mtp) or unsuitable_tp(config, model.mtp)
    return f"speculate is mtp, and the MTP layer does not suit: {reason}" if reason else None


def without_mtp(model: ModelConfig) -> str | None:
    """Says that config.json announces no MTP layer that is read; None if it does."""
    if model.mtp is not None:
        return None
    return (
        f"the model ({model.architecture}) has no MTP layer to draft with: that of Glm4MoeForCausalLM is read, where "
        "num_nextn_predict_layers in config.json is 1, and that of Qwen3.5, where mtp_num_hidden_layers is 1 and "
        "mtp_use_dedicated_embeddings is not true"
    )


def _unsuitable_head(config: EngineConfig, target: ModelFolder) -> str | None:
    assert config.draft_model is not None
    try:
        opened = Eagle3Folder.open(config.draft_model, require_weights=config.load == "folder")
    except InvalidModelFolder as error:
        return f"draft_model: {error}"
    reason = unsuitable_eagle3(opened.head, target.config) or _no_embedding(opened, target.config)
    return f"draft_model {opened.name}: {reason}" if reason else None


def unsuitable_eagle3(head: Eagle3Head, target: ModelConfig) -> str | None:
    """Explains why a head can't draft for a model, by their sizes; returns None if it can."""
    if head.vocab_size != target.vocab_size:
        return (
            f"is for a vocabulary of {head.vocab_size} tokens, and the model has one of {target.vocab_size}; they must "
            "be the same"
        )
    size, num_layers = target.description.hidden_size, len(target.description.layers)
    if head.target_hidden_size != size:
        return f"is for a model of hidden_size {head.target_hidden_size}, and the model's is {size}"
    layers = head.layers_of(num_layers)
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        return (
            f"reads the streams that enter layers {', '.join(map(str, layers))}, and the model has layers 0 to "
            f"{num_layers - 1}; eagle_aux_hidden_state_layer_ids in the head's config.json names them"
        )
    return None


def _no_embedding(opened: Eagle3Folder, target: ModelConfig) -> str | None:
    """A head of another width than its target's can't take the target's embedding or output layer.

    A head without an output layer has no embedding either.
    """
    own, other = opened.head.model.hidden_size, target.description.hidden_size
    if own == other or opened.has_embedding:
        return None
    return f"has no embedding, and the model's has {other} elements a token where the head has {own}"


def _uneven(draft: ModelFolder) -> str | None:
    model = draft.config.description
    if model.has_one_geometry and not model.shares_keys:
        return None
    return (
        f"has layers ({draft.config.architecture}) whose keys and values differ in size, or are read by other layers: "
        "the cache of a draft model has one size of layer"
    )


def _recurrent(draft: ModelFolder) -> str | None:
    if not draft.config.description.recurrent_layers:
        return None
    return f"has recurrent layers ({draft.config.architecture}), whose states do not go back where a draft is rejected"


def _other_vocabulary(draft: ModelFolder, target: ModelFolder) -> str | None:
    sizes = draft.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        return f"has a vocabulary of {sizes[0]} tokens, and the model has one of {sizes[1]}; they must be the same"
    if draft.token_table is None and target.token_table is not None:
        return f"has no {draft.tokenizer_name}, by which its vocabulary is compared with the model's"
    if draft.token_table is None or target.token_table is None:
        return None
    tables = draft.token_table, target.token_table
    digests = tables[0].digest(), tables[1].digest()
    if digests[0] == digests[1]:
        return None
    return (
        f"its tokenizer has another vocabulary ({len(tables[0].token_bytes)} tokens, hash {digests[0]}) than the "
        f"model's ({len(tables[1].token_bytes)} tokens, hash {digests[1]})"
    )


def _short_context(config: EngineConfig, draft: ModelFolder, target: ModelFolder) -> str | None:
    context, longest = (
        draft.config.max_position_embeddings,
        config.max_model_len or target.config.max_position_embeddings,
    )
    if context >= longest:
        return None
    return (
        f"has a context of {context} tokens, and sequences have up to {longest}: max_model_len of at most {context} "
        "works"
    )


def draft_ranks(config: EngineConfig) -> EngineConfig:
    """The configuration by which rules for ranks judge a draft model, whose experts are cut."""
    return config.model_copy(update={"expert_parallel": False})


def _unshared(config: EngineConfig, draft: ModelFolder) -> str | None:
    if config.draft_sharing != "shared":
        return None
    reason = unsuitable_tp(draft_ranks(config), draft.config)
    return f"draft_sharing is shared, and {reason}; draft_sharing whole works too" if reason else None


def _bits(config: EngineConfig, draft: ModelFolder) -> str | None:
    alone = config.model_copy(update={"quantize": config.draft_quantize})
    reason = unsuitable_quantization(alone, draft.config, draft.gguf_file)
    return _QUANTIZE.sub("draft_quantize", reason) if reason else None
