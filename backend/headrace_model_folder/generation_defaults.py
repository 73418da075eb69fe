"""generation_config.json: sampling defaults that a model's makers recommend.

Some of their recommendations have no effect here.

Owns what each key of that file means to a server: a default for requests, nothing (it configures
`transformers`), or something that would change answers and is not done.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from headrace_model_folder.bounded_files import MIB, exists_inside, read_json_object
from headrace_model_folder.errors import shown
from headrace_model_folder.fields import Fields

GENERATION_FILE = "generation_config.json"
# A hostile file has as many keys as fit.
_MOST_NAMED = 32
_READ = frozenset({"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id"})
# Where transformers computes, what it returns besides tokens, how it speculates, and ids that the
# tokenizer's own files say too.
_HARMLESS = frozenset(
    {
        "_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id",
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size",
        "compile_config", "disable_compile", "continuous_batching_config", "return_dict_in_generate", "output_scores",
        "output_logits", "output_attentions", "output_hidden_states", "is_assistant", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit",
        "assistant_lookbehind",
        "assistant_ensemble_weight", "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
        "speculation_type", "use_mtp",
    }
)  # fmt: skip
# Values that ask for nothing. Those of beam search count for nothing without beams.
_NEUTRAL: dict[str, Any] = {
    "max_length": 20,
    "min_length": 0,
    "min_new_tokens": 0,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
}


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for requests that leave a parameter out. None: the model's makers say nothing."""

    # 0 means greedy.
    temperature: float | None = None
    top_p: float | None = None
    # 0 means all tokens.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    # Empty if neither generation_config.json nor config.json names one.
    eos_token_ids: tuple[int, ...] = ()
    # What the file recommends besides and requests do not get, as "suppress_tokens (a list of 2
    # entries)".
    without_effect: tuple[str, ...] = ()


def read_generation_defaults(
    folder: pathlib.Path, vocab_size: int, context_tokens: int, eos_token_ids: tuple[int, ...]
) -> GenerationDefaults:
    """Reads generation_config.json if the folder has one.

    Args:
        folder: The model folder.
        vocab_size: Bound of token ids.
        context_tokens: Tokens that bound outputs anyway.
        eos_token_ids: config.json's ids, used where generation_config.json names none.

    Raises:
        InvalidModelFolder: a value out of range, naming the field.
    """
    if not exists_inside(folder, GENERATION_FILE):
        return GenerationDefaults(eos_token_ids=eos_token_ids)
    fields = Fields(GENERATION_FILE, read_json_object(folder, GENERATION_FILE, MIB))

    def number(key: str, low: float, high: float) -> float | None:
        return None if fields.get(key) is None else fields.number(key, low, high)

    return GenerationDefaults(
        temperature=number("temperature", 0.0, 100.0) if fields.boolean("do_sample", True) else 0.0,
        top_p=number("top_p", 1e-6, 1.0),
        # A top_k above the vocabulary keeps all tokens, and so does 0.
        top_k=None if fields.get("top_k") is None else min(fields.integer("top_k", 0, 1 << 31), vocab_size),
        min_p=number("min_p", 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1e-3, 1e3),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size) or eos_token_ids,
        without_effect=_without_effect(fields.values, context_tokens),
    )


def _without_effect(values: dict[str, Any], context_tokens: int) -> tuple[str, ...]:
    """Names, with values, recommendations that would change answers and are not followed."""
    found = []
    for key, value in values.items():
        if key in _READ or key in _HARMLESS or value in (None, [], {}) or value == _NEUTRAL.get(key):
            continue
        if key in ("max_length", "max_new_tokens") and type(value) is int and value >= context_tokens:
            continue
        found.append(f"{shown(key)[1:-1]} ({shown(value)})")
    return (*sorted(found)[:_MOST_NAMED], *([f"{len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []))
