"""Fields whose effect this server does not have, and those that ask for no effect.

Owns the tables, by OpenAI's and vLLM's names. A field is refused by name unless its value asks for
nothing, because an answer that silently lacks what was asked for is worse than none. A field that
neither OpenAI nor vLLM nor this server has is ignored, as vLLM does, since clients and proxies add
their own; the answer's header `x-headrace-ignored` names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from headrace_service import errors
from headrace_service.errors import ServiceError

# Values with which a field asks for nothing; null always does.
_NOTHING: Mapping[str, Collection[Any]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continuous_usage_stats": (False,),
    "allowed_token_ids": (),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": (),
    "include_obfuscation": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_thinking_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# Fields that change no answer: who asks, for the books of a hosted service, and hints.
_WITHOUT_EFFECT = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user", "request_id"}
)


def check(values: Mapping[str, Any], known: Collection[str], where: str = "") -> list[str]:
    """Refuses fields that ask for what this server does not do.

    Args:
        values: the request's fields, or those of an object in it, without null.
        known: those that this server reads itself.
        where: path of the object, with a dot; "" for the request.

    Returns:
        The fields that nobody knows, to be ignored.

    Raises:
        ServiceError: UNIMPLEMENTED, naming the field.
    """
    ignored = []
    for name, value in values.items():
        if name in known:
            continue
        if name in _NOTHING:
            if not _asks_for_nothing(value, _NOTHING[name]):
                raise unsupported(where + name, _NOTHING[name])
        elif name not in _WITHOUT_EFFECT:
            ignored.append(where + name)
    return ignored


def unsupported(field: str, harmless: Collection[Any] = ()) -> ServiceError:
    """Returns UNIMPLEMENTED for a field, with the values that are taken."""
    values = " or ".join(msgspec.json.encode(value).decode() for value in harmless)
    return errors.unimplemented(
        f"{field}: is not supported by this server" + (f", other than {values}" if values else "")
    )


def _asks_for_nothing(value: Any, harmless: Collection[Any]) -> bool:
    # 1 == True, but they are not the same to a caller.
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in harmless)
