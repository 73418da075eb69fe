"""Builds GenerationSpec from a caller's Python values.

Both clients and the command line use it.

Owns the names and types of the options. Does not know their ranges: the server does, and refuses
with field, rule and limit. Only what the wire format cannot carry (a negative token id, text that
is no UTF-8, prompt and token ids at once) is refused here, with the same exception and the same
field names. Python values come in, protobuf messages go out.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

from google.protobuf.duration_pb2 import Duration

from headrace.conversations.messages import json_text
from headrace.errors import invalid
from headrace.protobuf_fields import assign
from headrace.v1 import generation_pb2

_Number = TypeVar("_Number")

TraceDetailName = Literal["off", "array", "span"]
ReasoningEffortName = Literal["low", "medium", "high"]
EarlyStoppingName = Literal["heuristic", "full", "never"]


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A part of an output that has a form, as soon as the text has come to its trigger.

    Attributes:
        trigger: The text from which on the output has the form.
        begin: How the part begins, the trigger included.
        json_schema: A JSON Schema of what follows: its JSON text, or the object.
        end: How the part ends. Free text follows.
    """

    trigger: str
    begin: str
    json_schema: str | Mapping[str, Any] | bool
    end: str = ""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A search for the most likely outputs instead of sampling.

    Attributes:
        width: Outputs kept at each step. 1 to 16, at least n.
        length_penalty: Exponent of the length in tokens that log probabilities are divided by. -10
            to 10.
        early_stopping: When it ends that has found `width` whole outputs: "heuristic" (no other one
            would be better if it ended now), "full" (at once) or "never" (no other one can become
            better).
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStoppingName = "heuristic"


class GenerationOptions(TypedDict, total=False):
    """Options of every call that generates.

    Absent or None means: the model's own default, then the server's.

    Attributes:
        model: Name of the model. Default: the server's default model.
        temperature: Divides the logits; 0 is greedy. 0, or 0.01 to 100.
        top_p: Keeps the most likely tokens whose probabilities reach this sum. Above 0, to 1.
        top_k: Keeps this many of the most likely tokens; 0 and -1 keep all.
        min_p: Keeps tokens at least this likely relative to the most likely one. 0 to 1.
        top_n_sigma: Keeps logits at most this many standard deviations below the highest one; 0
            keeps all. 0 to 100.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen. 0.01 to
            10.
        presence_penalty: Subtracted from the logits of tokens in the output. -2 to 2.
        frequency_penalty: Subtracted once for each time the output contains the token. -2 to 2.
        seed: Seed of the sampling noise; any unsigned 64-bit value.
        logit_bias: Added to the logits of these token ids. At most 1,024 entries, -100 to 100.
        stop: A string, or up to 16, that end the output; the text ends before the match.
        stop_token_ids: Tokens that end the output, besides the model's own. At most 64.
        max_tokens: Most tokens per output. At least 1.
        min_tokens: Fewest tokens per output.
        ignore_eos: Whether to go on past the model's end-of-text tokens.
        bad_words: Words that are never generated. At most 64.
        include_stop_string: Whether a matched stop string stays in the text.
        n: Outputs sampled from the prompt in parallel. 1 to 128.
        logprobs: How many of the most likely tokens to report beside each sampled one. 0 to 20.
        priority: Higher runs first. -100 to 100.
        time_limit: Longest time from acceptance to the last token, as seconds or timedelta. At most
            24 hours.
        cache_salt: Shares cached prefixes only with requests of the same salt. At most 256 bytes.
        skip_special_tokens: Whether special tokens are left out of the text.
        token_ids_only: Whether to send token ids alone, without text and without waiting for whole
            characters.
        prompt_logprobs: How many of the most likely tokens to report at each position of the
            prompt; 0 reports the prompt's own. 0 to 20.
        trace_detail: How much of its tokens' way is traced, if it is traced at all: "off", "array"
            or "span". Default: the server's setting.
        max_drafts: Most drafted tokens that a step verifies for an output, 1 to 8, where the server
            drafts; 0: none. Answers are the same. Default: the server's setting.
        max_reasoning_tokens: Most tokens that each output may spend on its reasoning, at least 1;
            conversations only. Default: no limit but that of the output.
        reasoning_effort: How much the model is to reason: "low", "medium" or "high"; conversations
            only, with a model whose chat template takes it. Default: the template's.
        json_schema: A JSON Schema that each output must keep: its JSON text, or the object. Of this
            and the five after it at most one may be given.
        json_object: True: each output is a JSON object.
        regex: A regular expression that each output matches as a whole.
        choice: Texts of which each output is one.
        grammar: A context-free grammar in Lark's notation that each output follows.
        structural_tags: Parts of free text that have a form, as soon as their trigger has come.
        best_of: Outputs to sample, of which the n with the largest mean log probability are
            returned, whole, at the end. n to 20.
        beam_search: A search for the n most likely outputs instead of sampling: its width (n to
            16), or a BeamSearch. Outputs come whole, at the end.
    """

    model: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    top_n_sigma: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    bad_words: Sequence[str] | None
    include_stop_string: bool | None
    n: int | None
    logprobs: int | None
    priority: int | None
    time_limit: float | datetime.timedelta | None
    cache_salt: str | None
    skip_special_tokens: bool | None
    token_ids_only: bool | None
    prompt_logprobs: int | None
    trace_detail: TraceDetailName | None
    max_drafts: int | None
    max_reasoning_tokens: int | None
    reasoning_effort: ReasoningEffortName | None
    json_schema: str | Mapping[str, Any] | bool | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    structural_tags: Sequence[StructuralTag] | None
    best_of: int | None
    beam_search: int | BeamSearch | None


# Option -> (sub-message of GenerationSpec or "", field in it).
_FIELDS: dict[str, tuple[str, str]] = {
    **{
        name: ("sampling", name)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "top_n_sigma",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "logit_bias",
        )
    },
    **{
        name: ("structured_output", name)
        for name in ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tags")
    },
    "stop": ("stop", "strings"),
    "stop_token_ids": ("stop", "token_ids"),
    **{name: ("stop", name) for name in ("max_tokens", "min_tokens", "ignore_eos", "bad_words", "include_stop_string")},
    **{
        name: ("", name)
        for name in (
            "model",
            "n",
            "logprobs",
            "priority",
            "time_limit",
            "cache_salt",
            "skip_special_tokens",
            "token_ids_only",
            "prompt_logprobs",
            "trace_detail",
            "best_of",
            "beam_search",
            "max_reasoning_tokens",
            "reasoning_effort",
        )
    },
    "max_drafts": ("speculation", "max_drafts"),
}
TRACE_DETAILS: dict[str, generation_pb2.TraceDetail] = {
    "off": generation_pb2.TRACE_DETAIL_OFF,
    "array": generation_pb2.TRACE_DETAIL_ARRAY,
    "span": generation_pb2.TRACE_DETAIL_SPAN,
}
REASONING_EFFORTS: dict[str, generation_pb2.ReasoningEffort] = {
    "low": generation_pb2.REASONING_EFFORT_LOW,
    "medium": generation_pb2.REASONING_EFFORT_MEDIUM,
    "high": generation_pb2.REASONING_EFFORT_HIGH,
}
EARLY_STOPPING: dict[str, generation_pb2.EarlyStopping] = {
    "heuristic": generation_pb2.EARLY_STOPPING_HEURISTIC,
    "full": generation_pb2.EARLY_STOPPING_FULL,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}


def generation_spec(
    options: GenerationOptions, prompt: str | None = None, token_ids: Sequence[int] | None = None
) -> generation_pb2.GenerationSpec:
    """The spec of a Generate, Complete or Submit call.

    Raises:
        InvalidRequest: Not exactly one of prompt and token_ids, or a value that the wire format
            cannot carry.
        TypeError: An option of that name does not exist.
    """
    if (prompt is None) == (token_ids is None):
        raise invalid("spec.prompt", "exactly one of prompt and token_ids must be given")
    spec = chat_spec(options)
    if prompt is not None:
        assign(spec, "text", prompt, "spec.text")
    else:
        spec.token_ids.SetInParent()
        assign(spec.token_ids, "ids", token_ids, "spec.token_ids.ids")
    return spec


def chat_spec(options: GenerationOptions) -> generation_pb2.GenerationSpec:
    """The spec of a Chat call, whose prompt is its messages."""
    spec = generation_pb2.GenerationSpec()
    for name, value in options.items():
        if name not in _FIELDS:
            raise TypeError(_unknown_option(name))
        if value is not None:
            _set_option(spec, name, value)
    return spec


def path_of(name: str) -> str:
    """The path of an option's field, by which a server's refusals name it."""
    group, field = _FIELDS[name]
    return f"spec.{group}.{field}" if group else f"spec.{field}"


def duration(value: float | datetime.timedelta, path: str) -> Duration:
    """Returns seconds, or a timedelta, as a message.

    What the message cannot carry becomes an InvalidRequest that names `path`.
    """
    message = Duration()
    try:
        seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
        message.FromNanoseconds(round(seconds * 1e9))
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(path, f"must be a finite number of seconds (given: {value!r:.80})") from error
    return message


def trace_detail_of(name: str, path: str) -> generation_pb2.TraceDetail:
    """The number of a detail; an unknown name becomes an InvalidRequest that names `path`."""
    return _named(TRACE_DETAILS, name, path)


def _named(numbers: Mapping[str, _Number], name: str, path: str) -> _Number:
    """The number of a name; an unknown one becomes an InvalidRequest that names `path`."""
    if name not in numbers:
        raise invalid(path, f"must be one of {', '.join(numbers)} (given: {name!r:.80})")
    return numbers[name]


def _set_option(spec: generation_pb2.GenerationSpec, name: str, value: Any) -> None:
    group, field = _FIELDS[name]
    if name == "time_limit":
        spec.time_limit.CopyFrom(duration(value, "spec.time_limit"))
        return
    if name == "trace_detail":
        spec.trace_detail = trace_detail_of(value, "spec.trace_detail")
        return
    if name == "reasoning_effort":
        spec.reasoning_effort = _named(REASONING_EFFORTS, value, path_of(name))
        return
    if name == "beam_search":
        _set_beam_search(spec.beam_search, value, path_of(name))
        return
    if name == "max_drafts" and value == 0:
        spec.speculation.off = True
        return
    if group == "structured_output":
        _set_form(spec, name, value)
        return
    if name == "stop" and isinstance(value, str):
        value = [value]
    assign(getattr(spec, group) if group else spec, field, value, path_of(name))


def _set_beam_search(search: generation_pb2.BeamSearch, value: int | BeamSearch, path: str) -> None:
    options = value if isinstance(value, BeamSearch) else BeamSearch(value)
    assign(search, "width", options.width, f"{path}.width")
    assign(search, "length_penalty", options.length_penalty, f"{path}.length_penalty")
    search.early_stopping = _named(EARLY_STOPPING, options.early_stopping, f"{path}.early_stopping")


def _set_form(spec: generation_pb2.GenerationSpec, name: str, value: Any) -> None:
    """Sets the form that outputs must have; there is at most one."""
    if name == "json_object" and value is False:
        return
    output, path = spec.structured_output, path_of(name)
    earlier = output.WhichOneof("form")
    if earlier is not None:
        raise invalid(path, f"can't be given beside {earlier}: an output has one form")
    match name:
        case "json_schema":
            assign(output, name, json_text(value, path), path)
        case "json_object":
            output.json_object.SetInParent()
        case "choice":
            output.choice.SetInParent()
            assign(output.choice, "texts", _texts(value, path), f"{path}.texts")
        case "structural_tags":
            output.structural_tags.SetInParent()
            for index, tag in enumerate(value):
                _add_tag(output.structural_tags, tag, f"{path}.tags[{index}]")
        case _:
            assign(output, name, value, path)


def _add_tag(tags: generation_pb2.StructuralTags, tag: StructuralTag, path: str) -> None:
    added = tags.tags.add()
    assign(added, "json_schema", json_text(tag.json_schema, f"{path}.json_schema"), f"{path}.json_schema")
    for field in ("trigger", "begin", "end"):
        assign(added, field, getattr(tag, field), f"{path}.{field}")


def _texts(value: Sequence[str], path: str) -> Sequence[str]:
    if isinstance(value, str):
        raise invalid(path, f"must be several texts (given: {value!r:.80})")
    return value


def _unknown_option(name: str) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
