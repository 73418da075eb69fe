"""What callers may ask for: GenerationSpec -> ResolvedSpec.

Owns every rule of generation.proto that can be checked without the tokenizer, and the rules on
lengths that come after it. All violations of a request are collected and reported together, each
with field path, rule and limit. The engine checks again at its socket; nothing here relies on that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf import message

from headrace.v1 import generation_pb2, inference_pb2
from headrace_request import limits
from headrace_service import errors
from headrace_service.resolved_spec import ModelFacts, ResolvedSpec, Sampling, Stop
from headrace_service.violations import Violations, float32

Value = TypeVar("Value")

_REQUEST_ID = re.compile(limits.REQUEST_ID_PATTERN)
_MAX_REPORTED_IDS = 4
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
    sampling = _resolve_sampling(spec.sampling, model, found)
    stop = _resolve_stop(spec.stop, model, found)
    n = spec.n if spec.HasField("n") else 1
    max_outputs = min(limits.MAX_OUTPUTS, model.max_outputs)
    found.require(1 <= n <= max_outputs, "spec.n", f"must be at least 1 and at most {max_outputs}")
    for field in ("logprobs", "prompt_logprobs"):
        found.require(
            getattr(spec, field) <= limits.MAX_LOGPROBS, f"spec.{field}", f"must be at most {limits.MAX_LOGPROBS}"
        )
    found.require(
        abs(spec.priority) <= limits.MAX_PRIORITY,
        "spec.priority",
        f"must be at least -{limits.MAX_PRIORITY} and at most {limits.MAX_PRIORITY}",
    )
    salt = spec.cache_salt.encode()
    found.require(
        len(salt) <= limits.MAX_CACHE_SALT_BYTES,
        "spec.cache_salt",
        f"must have at most {limits.MAX_CACHE_SALT_BYTES} bytes",
    )
    found.require(
        spec.trace_detail in generation_pb2.TraceDetail.values(),
        "spec.trace_detail",
        "must be a TraceDetail of this API: off, array, span, or unset",
    )
    time_limit_ns = _time_limit_ns(spec, found)
    found.raise_if_any()
    return ResolvedSpec(
        sampling=sampling,
        stop=stop,
        n=n,
        logprobs=spec.logprobs if spec.HasField("logprobs") else None,
        prompt_logprobs=spec.prompt_logprobs if spec.HasField("prompt_logprobs") else None,
        priority=spec.priority,
        time_limit_ns=time_limit_ns,
        cache_salt=salt,
        skip_special_tokens=_given(spec, "skip_special_tokens", True),
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
    room = model.max_context_tokens - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise errors.invalid_field(prompt_field, "must give at least 1 token")
    if room < 1:
        raise errors.invalid_field(
            prompt_field,
            f"has {num_prompt_tokens} tokens; must have at most {model.max_context_tokens - 1}, so that a context of "
            f"{model.max_context_tokens} tokens leaves room for output",
        )
    max_tokens = room if spec.stop.max_tokens is None else spec.stop.max_tokens
    if max_tokens > room:
        raise errors.invalid_field(
            "spec.stop.max_tokens",
            f"must be at most {room}: the prompt has {num_prompt_tokens} tokens and the context {model.max_context_tokens}",
        )
    if spec.stop.min_tokens > max_tokens:
        raise errors.invalid_field("spec.stop.min_tokens", f"must be at most max_tokens, {max_tokens}")
    return max_tokens


def check_prompt_logprobs(spec: ResolvedSpec, num_prompt_tokens: int, max_bytes: int) -> None:
    """Raises RESOURCE_EXHAUSTED if what is told of the prompt can't be part of one answer of
    `max_bytes`.
    """
    if spec.prompt_logprobs is None:
        return
    least = (num_prompt_tokens - 1) * (_LEAST_LOGPROB_BYTES + _LEAST_TOP_LOGPROB_BYTES * spec.prompt_logprobs)
    if least > max_bytes:
        raise errors.exhausted(
            f"spec.prompt_logprobs: {spec.prompt_logprobs} most likely tokens at each of {num_prompt_tokens} prompt tokens take {least} "
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
    limit = model.max_context_tokens - 1
    if not 1 <= num_ids <= limit:
        found.add("spec.token_ids.ids", f"has {num_ids} tokens; must have at least 1 and at most {limit}")
    else:
        _check_ids(ids, model.vocabulary_size, "spec.token_ids.ids", found)  # type: ignore[arg-type]


def _check_text_size(text: str, max_bytes: int, field: str, found: Violations) -> None:
    # A character has at most 4 bytes; most texts need no count.
    num_bytes = len(text.encode()) if len(text) * 4 > max_bytes else 0
    found.require(num_bytes <= max_bytes, field, f"has {num_bytes} bytes; must have at most {max_bytes}")


def _check_ids(
    token_ids: Iterable[int], vocabulary_size: int, field: str, found: Violations, first_index: int = 0
) -> None:
    wrong = [index for index, token in enumerate(token_ids, first_index) if token >= vocabulary_size]
    for index in wrong[:_MAX_REPORTED_IDS]:
        found.add(f"{field}[{index}]", f"must be below the vocabulary size, {vocabulary_size}")


def _resolve_sampling(given: generation_pb2.SamplingParameters, model: ModelFacts, found: Violations) -> Sampling:
    defaults, path = model.defaults, "spec.sampling"
    temperature = _given(given, "temperature", defaults.temperature)
    found.require(
        temperature == 0 or float32(limits.MIN_TEMPERATURE) <= temperature <= limits.MAX_TEMPERATURE,
        f"{path}.temperature",
        f"must be 0 (greedy), or at least {limits.MIN_TEMPERATURE:g} and at most {limits.MAX_TEMPERATURE:g}",
    )
    top_k = _given(given, "top_k", defaults.top_k)
    found.require(
        -1 <= top_k <= model.vocabulary_size,
        f"{path}.top_k",
        f"must be at least -1 and at most {model.vocabulary_size}",
    )
    top_p = _given(given, "top_p", defaults.top_p)
    found.in_range(top_p, 0, 1, f"{path}.top_p", low_is_open=True)
    min_p = _given(given, "min_p", defaults.min_p)
    found.in_range(min_p, 0, 1, f"{path}.min_p")
    repetition = _given(given, "repetition_penalty", defaults.repetition_penalty)
    lowest, highest = limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY
    found.in_range(repetition, lowest, highest, f"{path}.repetition_penalty")
    for name in ("presence_penalty", "frequency_penalty"):
        found.in_range(getattr(given, name), -limits.MAX_PENALTY, limits.MAX_PENALTY, f"{path}.{name}")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        seed=given.seed if given.HasField("seed") else None,
        logit_bias=_resolve_logit_bias(given, model, found),
    )


def _resolve_logit_bias(
    given: generation_pb2.SamplingParameters, model: ModelFacts, found: Violations
) -> tuple[tuple[int, float], ...]:
    field = "spec.sampling.logit_bias"
    if len(given.logit_bias) > limits.MAX_LOGIT_BIAS:
        found.add(field, f"must have at most {limits.MAX_LOGIT_BIAS} entries")
        return ()
    for token, bias in given.logit_bias.items():
        found.require(
            token < model.vocabulary_size,
            f"{field}[{token}]",
            f"key must be below the vocabulary size, {model.vocabulary_size}",
        )
        found.in_range(bias, -limits.MAX_BIAS, limits.MAX_BIAS, f"{field}[{token}]")
    return tuple(sorted(given.logit_bias.items()))


def _resolve_stop(given: generation_pb2.StopConditions, model: ModelFacts, found: Violations) -> Stop:
    path = "spec.stop"
    most, bytes_each = limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_BYTES
    _check_strings(given.strings, most, bytes_each, f"{path}.strings", found)
    most, bytes_each = limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_BYTES
    _check_strings(given.bad_words, most, bytes_each, f"{path}.bad_words", found)
    if len(given.token_ids) > limits.MAX_STOP_TOKEN_IDS:
        found.add(f"{path}.token_ids", f"must have at most {limits.MAX_STOP_TOKEN_IDS} entries")
    else:
        _check_ids(given.token_ids, model.vocabulary_size, f"{path}.token_ids", found)
    max_tokens = given.max_tokens if given.HasField("max_tokens") else None
    limit = model.max_context_tokens - 1
    if max_tokens is not None:
        found.require(1 <= max_tokens <= limit, f"{path}.max_tokens", f"must be at least 1 and at most {limit}")
    most = limit if max_tokens is None else max_tokens
    found.require(given.min_tokens <= most, f"{path}.min_tokens", f"must be at most {most}")
    return Stop(
        strings=tuple(given.strings),
        token_ids=tuple(given.token_ids),
        max_tokens=max_tokens,
        min_tokens=given.min_tokens,
        ignore_eos=given.ignore_eos,
        bad_words=tuple(given.bad_words),
        include_stop_string=given.include_stop_string,
    )


def _check_strings(strings: Sequence[str], max_entries: int, max_bytes: int, field: str, found: Violations) -> None:
    if len(strings) > max_entries:
        found.add(field, f"must have at most {max_entries} entries")
        return
    for index, entry in enumerate(strings):
        num_bytes = len(entry.encode())
        found.require(
            1 <= num_bytes <= max_bytes, f"{field}[{index}]", f"must have at least 1 and at most {max_bytes} bytes"
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


def _given(given: message.Message, field: str, default: Value) -> Value:
    value: Value = getattr(given, field)
    return value if given.HasField(field) else default
