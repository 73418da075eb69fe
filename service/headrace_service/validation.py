"""What callers may ask for: GenerationSpec -> ResolvedSpec.

Owns the way from the public message to a `headrace_request.Request`, and the rules that only
services know (texts, time limits, ids of requests); those of the request itself are
`headrace_request.rules`. All violations of a request are collected and reported together, each with
field path, rule and limit. The engine checks again at its socket; nothing here relies on that.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
from google.protobuf import message

from headrace.v1 import generation_pb2, inference_pb2
from headrace_request import limits, rule_kinds, rules
from headrace_request.request import Request
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop
from headrace_service import errors
from headrace_service.resolved_spec import ModelFacts, ResolvedSpec
from headrace_service.violations import Violations

_REQUEST_ID = re.compile(limits.REQUEST_ID_PATTERN)
# Of a token in headrace.v1.Logprobs, and of one of its most likely tokens: a float and one-byte
# numbers.
_LEAST_LOGPROB_BYTES = 6
_LEAST_TOP_LOGPROB_BYTES = 5
_TRACED_PARAMETERS = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def resolve(spec: generation_pb2.GenerationSpec, model: ModelFacts, in_chat: bool = False) -> ResolvedSpec:
    """Checks a spec and fills in its defaults.

    Args:
        spec: as the caller sent it.
        model: limits and defaults.
        in_chat: whether messages are the prompt, so that the spec must have none.

    Raises:
        ServiceError: UNIMPLEMENTED for what is not built yet; INVALID_ARGUMENT with all violations.
    """
    _refuse_unbuilt(spec)
    found = Violations()
    _check_prompt(spec, model, in_chat, found)
    request = _request_of(spec, model)
    found.extend(rules.check(request, model.bounds))
    bad_words = tuple(spec.stop.bad_words[: limits.MAX_BAD_WORDS + 1])
    found.extend(rules.BAD_WORDS.broken("spec.stop.bad_words", [word.encode() for word in bad_words], model.bounds))
    found.require(
        spec.trace_detail in generation_pb2.TraceDetail.values(),
        "spec.trace_detail",
        "must be a TraceDetail of this API: off, array, span, or unset",
    )
    time_limit_ns = _time_limit_ns(spec, found)
    found.raise_if_any()
    return ResolvedSpec(
        request=request,
        max_tokens=spec.stop.max_tokens if spec.stop.HasField("max_tokens") else None,
        draws_seed=not spec.sampling.HasField("seed"),
        ignore_eos=spec.stop.ignore_eos,
        bad_words=bad_words,
        time_limit_ns=time_limit_ns,
        skip_special_tokens=spec.skip_special_tokens if spec.HasField("skip_special_tokens") else True,
        token_ids_only=spec.token_ids_only,
        trace_detail=spec.trace_detail,
        given=_given_parameters(spec),
    )


def refuse_tools(request: inference_pb2.ChatRequest) -> None:
    """Raises UNIMPLEMENTED if a chat offers functions."""
    if request.tools:
        raise errors.unimplemented("tools: tool calls are not built yet")


def resolve_max_tokens(spec: ResolvedSpec, num_prompt_tokens: int, model: ModelFacts, prompt_field: str) -> int:
    """Returns how many tokens an output may have, given its prompt.

    Raises:
        ServiceError: INVALID_ARGUMENT; prompt and output do not fit the context.
    """
    room = model.bounds.max_context_tokens - num_prompt_tokens
    max_tokens = room if spec.max_tokens is None else spec.max_tokens
    found = rules.check_lengths(num_prompt_tokens, max_tokens, spec.request.stop.min_tokens, model.bounds, prompt_field)
    if found:
        raise errors.invalid(found)
    return max_tokens


def check_prompt_logprobs(spec: ResolvedSpec, num_prompt_tokens: int, max_bytes: int) -> None:
    """Raises RESOURCE_EXHAUSTED if what is told of the prompt can't be part of one answer of
    `max_bytes`.
    """
    num_tops = spec.request.num_prompt_logprobs
    if num_tops < 0:
        return
    least = (num_prompt_tokens - 1) * (_LEAST_LOGPROB_BYTES + _LEAST_TOP_LOGPROB_BYTES * num_tops)
    if least > max_bytes:
        raise errors.exhausted(
            f"spec.prompt_logprobs: {num_tops} most likely tokens at each of {num_prompt_tokens} prompt tokens take {least} "
            f"bytes or more, a message at most {max_bytes}; use Generate"
        )


def check_token_ids(token_ids: Iterable[int], vocabulary_size: int, field: str, first_index: int = 0) -> None:
    """Raises INVALID_ARGUMENT if an id, the first being number `first_index` of its field, is none
    of the vocabulary's.
    """
    found = Violations()
    _check_ids(token_ids, vocabulary_size, field, found, first_index)
    found.raise_if_any()


def check_text(text: str, max_bytes: int, field: str) -> None:
    """Raises INVALID_ARGUMENT if a text is too long to be encoded."""
    found = Violations()
    _check_text_size(text, max_bytes, field, found)
    found.raise_if_any()


def check_request_id(request_id: str) -> None:
    """Raises INVALID_ARGUMENT for no id, NOT_FOUND for one that no request can have."""
    if not request_id:
        raise errors.invalid_field("request_id", "must be set")
    if not _REQUEST_ID.fullmatch(request_id):
        raise errors.not_found(f"request {errors.echo(request_id)} is not known, or its log has expired")


def check_idempotency_key(key: str) -> None:
    """Raises INVALID_ARGUMENT if a key is too long."""
    if len(key.encode()) > limits.MAX_IDEMPOTENCY_KEY_BYTES:
        raise errors.invalid_field("idempotency_key", f"must have at most {limits.MAX_IDEMPOTENCY_KEY_BYTES} bytes")


def check_subscription(request_id: str, output_index: int | None) -> None:
    """Raises INVALID_ARGUMENT or NOT_FOUND if no request can have this id, or this output."""
    check_request_id(request_id)
    if output_index is not None and output_index >= limits.MAX_OUTPUTS:
        raise errors.invalid_field("output_index", f"must be below {limits.MAX_OUTPUTS}")


def _refuse_unbuilt(spec: generation_pb2.GenerationSpec) -> None:
    for field, what in (("structured_output", "structured output"), ("beam_search", "beam search")):
        if spec.HasField(field):
            raise errors.unimplemented(f"spec.{field}: {what} is not built yet")


def _check_prompt(spec: generation_pb2.GenerationSpec, model: ModelFacts, in_chat: bool, found: Violations) -> None:
    kind = spec.WhichOneof("prompt")
    if in_chat:
        found.require(kind is None, f"spec.{kind}", "must not be set in Chat, where the messages are the prompt")
    elif kind is None:
        found.add("spec.prompt", "one of spec.text and spec.token_ids must be set")
    elif kind == "text":
        found.require(spec.text != "", "spec.text", "must not be empty")
        _check_text_size(spec.text, model.max_text_bytes, "spec.text", found)
    else:
        _check_prompt_ids(spec.token_ids.ids, model, found)


def _check_prompt_ids(ids: message.Message | Iterable[int], model: ModelFacts, found: Violations) -> None:
    num_ids = len(ids)  # type: ignore[arg-type]
    limit = model.bounds.max_context_tokens - 1
    if not 1 <= num_ids <= limit:
        found.add("spec.token_ids.ids", f"has {num_ids} tokens; must have at least 1 and at most {limit}")
    else:
        _check_ids(ids, model.bounds.vocabulary_size, "spec.token_ids.ids", found)  # type: ignore[arg-type]


def _check_text_size(text: str, max_bytes: int, field: str, found: Violations) -> None:
    # A character has at most 4 bytes; most texts need no count.
    num_bytes = len(text.encode()) if len(text) * 4 > max_bytes else 0
    found.require(num_bytes <= max_bytes, field, f"has {num_bytes} bytes; must have at most {max_bytes}")


def _check_ids(
    token_ids: Iterable[int], vocabulary_size: int, field: str, found: Violations, first_index: int = 0
) -> None:
    wrong = [index for index, token in enumerate(token_ids, first_index) if token >= vocabulary_size]
    found.extend(rule_kinds.unknown_tokens(field, wrong, vocabulary_size))


def _request_of(spec: generation_pb2.GenerationSpec, model: ModelFacts) -> Request:
    """Returns what a spec asks the engine for, unchecked, with defaults in the place of what is
    absent. Of lists that are too long one entry too many is taken.
    """
    return Request(
        prompt_token_ids=b"",
        stop=_stop_of(spec.stop, model),
        sampling=_sampling_of(spec.sampling, model.defaults),
        n=spec.n if spec.HasField("n") else 1,
        num_logprobs=spec.logprobs if spec.HasField("logprobs") else -1,
        num_prompt_logprobs=spec.prompt_logprobs if spec.HasField("prompt_logprobs") else -1,
        priority=spec.priority,
        cache_salt=spec.cache_salt.encode(),
    )


def _sampling_of(given: generation_pb2.SamplingParameters, defaults: Sampling) -> Sampling:
    """Returns the sampling that a caller asks for. Fields of the message are fields of the struct by
    the same name.
    """
    values: dict[str, Any] = {field.name: value for field, value in given.ListFields()}
    biases = values.pop("logit_bias", None)
    if biases is not None:
        entries = sorted(itertools.islice(biases.items(), limits.MAX_LOGIT_BIAS + 1))
        values["logit_bias_ids"] = array("I", [token for token, _ in entries]).tobytes()
        values["logit_bias_values"] = array("f", [bias for _, bias in entries]).tobytes()
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return msgspec.structs.replace(defaults, **values)


def _stop_of(given: generation_pb2.StopConditions, model: ModelFacts) -> Stop:
    return Stop(
        max_tokens=given.max_tokens if given.HasField("max_tokens") else model.bounds.max_context_tokens - 1,
        min_tokens=given.min_tokens,
        strings=tuple([string.encode() for string in given.strings[: limits.MAX_STOP_STRINGS + 1]]),
        token_ids=array("I", given.token_ids[: limits.MAX_STOP_TOKEN_IDS + 1]).tobytes(),
        include_stop_string=given.include_stop_string,
    )


def _time_limit_ns(spec: generation_pb2.GenerationSpec, found: Violations) -> int | None:
    if not spec.HasField("time_limit"):
        return None
    limit = spec.time_limit
    limit_ns = limit.seconds * 10**9 + limit.nanos
    if (
        abs(limit.nanos) >= 10**9
        or limit.seconds * limit.nanos < 0
        or not 0 < limit_ns <= limits.MAX_TIME_LIMIT_S * 10**9
    ):
        found.add("spec.time_limit", f"must be above 0 and at most {limits.MAX_TIME_LIMIT_S // 3600} hours")
    return limit_ns


def _given_parameters(spec: generation_pb2.GenerationSpec) -> dict[str, int | float]:
    """Returns what the caller gave, by the names of gen_ai.request; of stop strings their number
    alone.
    """
    sampling, stop = spec.sampling, spec.stop
    given = {name: getattr(sampling, name) for name in _TRACED_PARAMETERS if sampling.HasField(name)}
    if stop.HasField("max_tokens"):
        given["max_tokens"] = stop.max_tokens
    if spec.HasField("n"):
        given["choice.count"] = spec.n
    if stop.strings:
        given["stop_sequences"] = len(stop.strings)
    return given
