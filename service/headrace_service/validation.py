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
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.v1 import generation_pb2
from headrace_request import limits, rule_kinds, rules, structured_output
from headrace_request.beam_search import BeamSearch, EarlyStopping
from headrace_request.request import Request
from headrace_request.rule_kinds import Found, Violation
from headrace_request.sampling import Sampling
from headrace_request.selection_rules import NO_SAMPLING
from headrace_request.stop import Stop
from headrace_request.structured_output import StructuredOutput, Tag
from headrace_service import errors
from headrace_service.resolved_spec import ModelFacts, ResolvedSpec

_REQUEST_ID = re.compile(limits.REQUEST_ID_PATTERN)
# Of a token in headrace.v1.Logprobs, and of one of its most likely tokens: a float and one-byte
# numbers.
_LEAST_LOGPROB_BYTES = 6
_LEAST_TOP_LOGPROB_BYTES = 5
_EARLY_STOPPING: dict[int, EarlyStopping] = {
    generation_pb2.EARLY_STOPPING_FULL: "full",
    generation_pb2.EARLY_STOPPING_NEVER: "never",
}
_TRACED_PARAMETERS = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def resolve(spec: generation_pb2.GenerationSpec, model: ModelFacts, in_chat: bool = False) -> ResolvedSpec:
    """Checks a spec and fills in its defaults.

    Args:
        spec: as the caller sent it.
        model: limits and defaults.
        in_chat: whether messages are the prompt, so that the spec must have none.

    Raises:
        ServiceError: INVALID_ARGUMENT with all violations.
    """
    broken_prompt = _check_prompt(spec, model, in_chat)
    broken_extras = [
        *_check_extras(spec),
        *_check_reasoning(spec, model, in_chat),
        *_check_effort(spec, model, in_chat),
    ]
    request, given = _request_of(spec, model), _given_parameters(spec)
    bad_words = tuple(spec.stop.bad_words[: limits.MAX_BAD_WORDS + 1])
    words = [word.encode() for word in bad_words]
    broken = [
        *broken_prompt,
        *rules.check(request, model.bounds),
        *rules.BAD_WORDS.broken("spec.stop.bad_words", words, model.bounds),
        *broken_extras,
    ]
    if broken:
        raise errors.invalid(broken)
    return ResolvedSpec(
        request=request,
        max_tokens=spec.stop.max_tokens if spec.stop.HasField("max_tokens") else None,
        draws_seed=not spec.sampling.HasField("seed") and request.beam_search is None,
        ignore_eos=spec.stop.ignore_eos,
        bad_words=bad_words,
        time_limit_ns=spec.time_limit.ToNanoseconds() if spec.HasField("time_limit") else None,
        skip_special_tokens=spec.skip_special_tokens if spec.HasField("skip_special_tokens") else True,
        token_ids_only=spec.token_ids_only,
        max_reasoning_tokens=spec.max_reasoning_tokens if spec.HasField("max_reasoning_tokens") else None,
        trace_detail=spec.trace_detail,
        given=given,
    )


def check_prompt_logprobs(spec: ResolvedSpec, num_prompt_tokens: int, max_bytes: int) -> None:
    """Raises RESOURCE_EXHAUSTED if the prompt's log probabilities cannot fit one answer."""
    num_tops = spec.request.num_prompt_logprobs
    if num_tops < 0:
        return
    least = (num_prompt_tokens - 1) * (_LEAST_LOGPROB_BYTES + _LEAST_TOP_LOGPROB_BYTES * num_tops)
    if least > max_bytes:
        raise errors.exhausted(
            f"spec.prompt_logprobs: {num_tops} most likely tokens at each of {num_prompt_tokens} prompt tokens take "
            f"{least} "
            f"bytes or more, a message at most {max_bytes}; use Generate"
        )


def check_token_ids(token_ids: Iterable[int], vocabulary_size: int, field: str, first_index: int = 0) -> None:
    """Raises INVALID_ARGUMENT if the vocabulary lacks an id.

    The first id is entry `first_index` of its field.
    """
    broken = _check_ids(token_ids, vocabulary_size, field, first_index)
    if broken:
        raise errors.invalid(broken)


def check_text(text: str, max_bytes: int, field: str) -> None:
    """Raises INVALID_ARGUMENT if a text is too long to be encoded."""
    broken = _check_text_size(text, max_bytes, field)
    if broken:
        raise errors.invalid(broken)


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


def _check_prompt(spec: generation_pb2.GenerationSpec, model: ModelFacts, in_chat: bool) -> Found:
    kind = spec.WhichOneof("prompt")
    if in_chat:
        rule = "must not be set in Chat, where the messages are the prompt"
        return () if kind is None else [Violation(f"spec.{kind}", rule)]
    if kind is None:
        return [Violation("spec.prompt", "one of spec.text and spec.token_ids must be set")]
    if kind == "token_ids":
        return _check_prompt_ids(spec.token_ids.ids, model)
    if spec.text == "":
        return [Violation("spec.text", "must not be empty")]
    return _check_text_size(spec.text, model.max_text_bytes, "spec.text")


def _check_prompt_ids(ids: Sequence[int], model: ModelFacts) -> Found:
    limit = model.bounds.max_context_tokens - 1
    if not 1 <= len(ids) <= limit:
        rule = f"has {len(ids)} tokens; must have at least 1 and at most {limit}"
        return [Violation("spec.token_ids.ids", rule)]
    return _check_ids(ids, model.bounds.vocabulary_size, "spec.token_ids.ids")


def _check_text_size(text: str, max_bytes: int, field: str) -> Found:
    # A character has at most 4 bytes; most texts need no count.
    num_bytes = len(text.encode()) if len(text) * 4 > max_bytes else 0
    if num_bytes <= max_bytes:
        return ()
    return [Violation(field, f"has {num_bytes} bytes; must have at most {max_bytes}")]


def _check_ids(token_ids: Iterable[int], vocabulary_size: int, field: str, first_index: int = 0) -> Found:
    wrong = [index for index, token in enumerate(token_ids, first_index) if token >= vocabulary_size]
    return rule_kinds.unknown_tokens(field, wrong, vocabulary_size)


def _check_extras(spec: generation_pb2.GenerationSpec) -> list[Violation]:
    """Returns the rules that a spec breaks in the fields that only services know."""
    broken = []
    if spec.HasField("structured_output") and spec.structured_output.WhichOneof("form") is None:
        broken.append(Violation("spec.structured_output.form", "one form must be set"))
    if spec.trace_detail not in generation_pb2.TraceDetail.values():
        rule = "must be a TraceDetail of this API: off, array, span, or unset"
        broken.append(Violation("spec.trace_detail", rule))
    broken += _check_speculation(spec)
    if spec.beam_search.early_stopping not in generation_pb2.EarlyStopping.values():
        rule = "must be an EarlyStopping of this API: heuristic, full, never, or unset"
        broken.append(Violation("spec.beam_search.early_stopping", rule))
    if spec.HasField("beam_search") and spec.stop.bad_words:
        # They are no tokens yet, by which the request's own rule goes.
        broken.append(Violation("spec.stop.bad_words", "must not be set with beam search"))
    if spec.HasField("best_of") and spec.best_of == 0:
        broken.append(Violation("spec.best_of", "must be at least 1"))
    limit = spec.time_limit
    well_formed = abs(limit.nanos) < 10**9 and limit.seconds * limit.nanos >= 0
    within = 0 < limit.seconds * 10**9 + limit.nanos <= limits.MAX_TIME_LIMIT_S * 10**9
    if spec.HasField("time_limit") and not (well_formed and within):
        rule = f"must be above 0 and at most {limits.MAX_TIME_LIMIT_S // 3600} hours"
        broken.append(Violation("spec.time_limit", rule))
    return broken


def _check_reasoning(spec: generation_pb2.GenerationSpec, model: ModelFacts, in_chat: bool) -> Found:
    """Returns how the budget of reasoning breaks its rule."""
    field, most = "spec.max_reasoning_tokens", model.bounds.max_context_tokens - 1
    if not spec.HasField("max_reasoning_tokens"):
        return ()
    if not in_chat:
        return (Violation(field, "must not be set but for a conversation"),)
    if not model.reasons:
        return (Violation(field, "must not be set: the model's chat template has no markers of reasoning"),)
    if not 1 <= spec.max_reasoning_tokens <= most:
        return (Violation(field, f"must be at least 1 and at most {most}"),)
    return ()


def _check_effort(spec: generation_pb2.GenerationSpec, model: ModelFacts, in_chat: bool) -> Found:
    """Returns how the effort of reasoning breaks its rule."""
    field, effort = "spec.reasoning_effort", spec.reasoning_effort
    if effort == generation_pb2.REASONING_EFFORT_UNSPECIFIED:
        return ()
    if effort not in generation_pb2.ReasoningEffort.values():
        return (Violation(field, "must be a ReasoningEffort of this API: low, medium, high, or unset"),)
    if not in_chat:
        return (Violation(field, "must not be set but for a conversation"),)
    if not model.takes_effort:
        return (Violation(field, "must not be set: the model's chat template has no reasoning_effort"),)
    return ()


def _check_speculation(spec: generation_pb2.GenerationSpec) -> Found:
    """Returns the rules of the message's form that its speculation breaks."""
    mode = spec.speculation.WhichOneof("mode") if spec.HasField("speculation") else "off"
    if mode is None:
        return (Violation("spec.speculation", "one of off and max_drafts must be set"),)
    if mode == "max_drafts" and spec.speculation.max_drafts == 0:
        rule = f"must be at least 1 and at most {limits.MAX_DRAFTS}; off asks for none"
        return (Violation("spec.speculation.max_drafts", rule),)
    if spec.HasField("speculation") and mode == "off" and not spec.speculation.off:
        return (Violation("spec.speculation.off", "must be true, or speculation unset"),)
    return ()


def _request_of(spec: generation_pb2.GenerationSpec, model: ModelFacts) -> Request:
    """Returns what a spec asks the engine for, unchecked, with defaults for what is absent.

    Lists that are too long are cut one entry behind their limit, which the check finds.
    """
    return Request(
        prompt_token_ids=b"",
        stop=_stop_of(spec.stop, model),
        sampling=_sampling_of(spec.sampling, NO_SAMPLING if spec.HasField("beam_search") else model.defaults),
        n=spec.n if spec.HasField("n") else 1,
        num_logprobs=spec.logprobs if spec.HasField("logprobs") else -1,
        num_prompt_logprobs=spec.prompt_logprobs if spec.HasField("prompt_logprobs") else -1,
        priority=spec.priority,
        cache_salt=spec.cache_salt.encode(),
        max_drafts=_max_drafts_of(spec.speculation),
        structured_output=_structured_output_of(spec.structured_output),
        best_of=spec.best_of,
        beam_search=_beam_search_of(spec.beam_search) if spec.HasField("beam_search") else None,
    )


def _beam_search_of(given: generation_pb2.BeamSearch) -> BeamSearch:
    """Returns the search that a caller asks for; an unknown way to end is refused elsewhere."""
    return BeamSearch(
        width=given.width,
        length_penalty=given.length_penalty if given.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING.get(given.early_stopping, "heuristic"),
    )


def _max_drafts_of(given: generation_pb2.Speculation) -> int:
    """Returns how many drafts a step may verify; -1: as many as the server has."""
    if given.WhichOneof("mode") == "max_drafts":
        return given.max_drafts
    return 0 if given.off else -1


def _sampling_of(given: generation_pb2.SamplingParameters, defaults: Sampling) -> Sampling:
    """Returns the sampling that a caller asks for.

    Fields of the message are fields of the struct by the same name.
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


def _structured_output_of(given: generation_pb2.StructuredOutput) -> StructuredOutput | None:
    """Returns the form that a caller asks for; None: any text."""
    match given.WhichOneof("form"):
        case "choice":
            return structured_output.choice(list(given.choice.texts))
        case "structural_tags":
            tags = [Tag(tag.trigger, tag.begin, tag.json_schema, tag.end) for tag in given.structural_tags.tags]
            return structured_output.structural_tags(tags)
        case "json_object":
            return StructuredOutput("json_object")
        case "json_schema" | "regex" | "grammar" as form:
            return StructuredOutput(form, getattr(given, form))
    return None


def _given_parameters(spec: generation_pb2.GenerationSpec) -> dict[str, int | float]:
    """Returns what the caller gave, by the names of gen_ai.request.

    Of stop strings their number alone.
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
