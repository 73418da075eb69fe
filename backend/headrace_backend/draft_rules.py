"""Which models may draft for another: what of it can be refused before weights are read.

Owns the rules and their words; supervisor, backend and worker all ask here. A draft model proposes
tokens by their ids and follows its target's sequences to their ends, so both must have the same
vocabulary, and the draft model at least the context of the longest sequence. How it proposes is
`worker.speculation`'s. No torch.
"""

from __future__ import annotations

import re

from headrace_backend.config import EngineConfig
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_model_folder import InvalidModelFolder, ModelFolder

# The setting by which a rule for the model's own weights says what is wrong.
_QUANTIZE = re.compile(r"\bquantize\b")


def unsuitable_draft(config: EngineConfig, target: ModelFolder) -> str | None:
    """Explains why `config.draft_model` can't draft for a model; returns None if it can.

    None too where no draft model is configured. The draft model's folder is opened, and its weights
    are not read.

    Args:
        config: The engine's configuration.
        target: The model that verifies what is drafted.
    """
    if config.draft_model is None:
        return None
    try:
        draft = ModelFolder.open(config.draft_model, require_weights=config.load == "folder")
    except InvalidModelFolder as error:
        return f"draft_model: {error}"
    reason = _other_vocabulary(draft, target) or _short_context(config, draft, target) or _bits(config, draft)
    return f"draft_model {draft.name}: {reason}" if reason else None


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


def _bits(config: EngineConfig, draft: ModelFolder) -> str | None:
    alone = config.model_copy(update={"quantize": config.draft_quantize})
    reason = unsuitable_quantization(alone, draft.config, draft.gguf_file)
    return _QUANTIZE.sub("draft_quantize", reason) if reason else None
