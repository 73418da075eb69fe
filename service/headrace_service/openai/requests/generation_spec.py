"""The fields that both kinds of request share, as a GenerationSpec.

Owns the translation, and what fields of GenerationSpec are called here. Ranges are checked by
`validation`, as for every wire; only what a field of the spec could not hold is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headrace.v1 import generation_pb2
from headrace_request.sampling import Sampling
from headrace_service import errors, foreign_forms
from headrace_service.openai.requests.shared_fields import SharedFields

_MAX_U64 = (1 << 64) - 1
_MAX_I32 = (1 << 31) - 1
_SEEDS = range(-(1 << 63), 1 << 64)
_MAX_FLOAT32 = 3.4028235e38
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_TOKEN_ID = (1 << 32) - 1
_FLOATS = tuple(field.name for field in msgspec.structs.fields(Sampling) if field.type is float)

NAMES: Final[Mapping[str, str]] = {
    "spec.text": "prompt",
    "spec.token_ids.ids": "prompt",
    "spec.n": "n",
    "spec.best_of": "best_of",
    "spec.logprobs": "logprobs",
    "spec.prompt_logprobs": "logprobs",
    **{f"spec.sampling.{field.name}": field.name for field in msgspec.structs.fields(Sampling)},
    "spec.sampling.logit_bias": "logit_bias",
    "spec.stop.strings": "stop",
    "spec.stop.max_tokens": "max_tokens",
    "spec.stop.min_tokens": "min_tokens",
    "spec.stop.token_ids": "stop_token_ids",
    "spec.stop.bad_words": "bad_words",
    "spec.priority": "priority",
    "spec.cache_salt": "cache_salt",
    "spec.time_limit": "x-request-timeout",
}


def spec_of(asked: SharedFields, max_tokens: int | None, max_tokens_field: str) -> generation_pb2.GenerationSpec:
    """Returns what the shared fields ask for, without prompt and log probabilities.

    Args:
        asked: the request's fields.
        max_tokens: most tokens of an output; None: what the prompt leaves of the context.
        max_tokens_field: what the caller calls it.

    Raises:
        ServiceError: INVALID_ARGUMENT; a value that no field of the spec holds.
    """
    spec = generation_pb2.GenerationSpec()
    if asked.n is not None:
        spec.n = asked.n
    if max_tokens is not None:
        spec.stop.max_tokens = _unsigned(max_tokens, max_tokens_field)
    if asked.priority is not None:
        # vLLM's smaller numbers come first, here larger ones.
        spec.priority = min(-asked.priority, _MAX_I32)
    if asked.cache_salt is not None:
        spec.cache_salt = asked.cache_salt
    if asked.skip_special_tokens is not None:
        spec.skip_special_tokens = asked.skip_special_tokens
    form = _form_of(asked)
    if form is not None:
        spec.structured_output.CopyFrom(form[1])
    _fill_sampling(spec.sampling, asked)
    _fill_stop(spec.stop, asked)
    return spec


def names_of_form(asked: SharedFields) -> dict[str, str]:
    """What the form of outputs is called in this request."""
    form = _form_of(asked)
    return foreign_forms.names("response_format" if form is None else form[0])


def has_form(asked: SharedFields) -> bool:
    """Returns whether a request asks for a form of outputs."""
    return _form_of(asked) is not None


def _form_of(asked: SharedFields) -> tuple[str, foreign_forms.Output] | None:
    """Returns the form of outputs with the field that asks for it; None: any text.

    Raises:
        ServiceError: INVALID_ARGUMENT, two fields ask for one, or a form is none; UNIMPLEMENTED.
    """
    forms = {
        "response_format": _read(asked.response_format, "response_format", foreign_forms.read_response_format),
        "structured_outputs": _read(asked.structured_outputs, "structured_outputs", foreign_forms.read_vllm),
        "structural_tag": _read(asked.structural_tag, "structural_tag", foreign_forms.VLLM_FORMS["structural_tag"]),
    }
    for name in ("json", "regex", "choice", "grammar"):
        field = f"guided_{name}"
        forms[field] = _read(getattr(asked, field), field, foreign_forms.VLLM_FORMS[name])
    given = [(field, form) for field, form in forms.items() if form is not None]
    if len(given) > 1:
        raise errors.invalid_field(given[1][0], f"must not be given beside {given[0][0]}: an output has one form")
    return given[0] if given else None


def _read(
    value: Any, field: str, read: Callable[[Any, str], foreign_forms.Output | None]
) -> foreign_forms.Output | None:
    return None if value is None else read(value, field)


def _fill_sampling(sampling: generation_pb2.SamplingParameters, asked: SharedFields) -> None:
    for name in _FLOATS:
        value = getattr(asked, name)
        if value is not None:
            setattr(sampling, name, _float32(value, name))
    if asked.top_k is not None:
        sampling.top_k = asked.top_k
    if asked.seed is not None:
        if asked.seed not in _SEEDS:
            raise errors.invalid_field("seed", f"must be at least {_SEEDS.start} and at most {_SEEDS.stop - 1}")
        # OpenAI's are signed.
        sampling.seed = asked.seed & _MAX_U64
    for token, bias in (asked.logit_bias or {}).items():
        field = f"logit_bias[{token[:16]}]"
        if not _TOKEN_ID.fullmatch(token) or int(token) > _MAX_TOKEN_ID:
            raise errors.invalid_field(field, "must have a token id as its key")
        sampling.logit_bias[int(token)] = _float32(bias, field)


def _fill_stop(stop: generation_pb2.StopConditions, asked: SharedFields) -> None:
    if asked.stop is not None:
        stop.strings.extend([asked.stop] if isinstance(asked.stop, str) else asked.stop)
    if asked.stop_token_ids is not None:
        stop.token_ids.extend(asked.stop_token_ids)
    if asked.bad_words is not None:
        stop.bad_words.extend(asked.bad_words)
    if asked.min_tokens is not None:
        stop.min_tokens = asked.min_tokens
    stop.ignore_eos = bool(asked.ignore_eos)
    stop.include_stop_string = bool(asked.include_stop_str_in_output)


def _unsigned(value: int, field: str) -> int:
    if not 0 <= value <= _MAX_TOKEN_ID:
        raise errors.invalid_field(field, f"must be at least 0 and at most {_MAX_TOKEN_ID}")
    return value


def _float32(value: float, field: str) -> float:
    if not abs(value) <= _MAX_FLOAT32:
        raise errors.invalid_field(field, "must be a number that float32 holds")
    return value
