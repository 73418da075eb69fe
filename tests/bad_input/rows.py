"""Bad requests for a generation, one row each, as every entrance of the server is asked for them.

A row has up to three forms: a `GenerationSpec` for the own API, sampling parameters (or the
prompt's bytes) for the KServe wire, a change of a valid `AddRequest` for the engine's socket. None
where an entrance cannot express the row. Numbers are those of the bad-input list that the rows were
taken from.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import duration_pb2
from tests.support import engine_requests

from headrace.v1 import generation_pb2
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.beam_search import BeamSearch
from headrace_request.sampling import Sampling as EngineSampling
from headrace_request.selection_rules import NO_SAMPLING
from headrace_request.structured_output import StructuredOutput

Spec = generation_pb2.GenerationSpec
Sampling = generation_pb2.SamplingParameters
Stop = generation_pb2.StopConditions
Ids = generation_pb2.TokenIds
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@dataclasses.dataclass(frozen=True)
class Facts:
    """Limits of the model behind an entrance."""

    vocabulary: int
    context: int
    max_outputs: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One bad request.

    Attributes:
        name: number and words.
        field: what every refusal must name, in any entrance's spelling.
        spec: for the own API.
        sampling: JSON of sampling parameters for KServe.
        prompt: prompt bytes for KServe.
        engine: for the engine's socket.
        code: the status.
    """

    name: str
    field: str
    spec: Callable[[Facts], Spec] | None = None
    sampling: Callable[[Facts], str] | None = None
    prompt: bytes | None = None
    engine: Callable[[engine_pb2.AddRequest, Facts], None] | None = None
    code: grpc.StatusCode = INVALID


def _number(number: str, name: str, value: Any, *, wire: Any = None, engine: Any = None) -> Row:
    """A sampling parameter that goes by the same name everywhere.

    `wire`, `engine`: the value there, if it is spelled otherwise.
    """
    spelled = value if wire is None else wire
    at_engine = value if engine is None else engine

    def change(add: engine_pb2.AddRequest, facts: Facts) -> None:
        engine_requests.change(add, f"sampling.{name}", at_engine(facts) if callable(at_engine) else at_engine)

    return Row(
        f"{number} {name} {spelled if not callable(spelled) else 'beyond'}",
        name,
        lambda facts: Spec(text="hi", sampling=Sampling(**{name: value(facts) if callable(value) else value})),
        lambda facts: json.dumps({name: spelled(facts) if callable(spelled) else spelled}),
        engine=change,
    )


def _set(message: str, field: str, value: Any) -> Callable[[engine_pb2.AddRequest, Facts], None]:
    def change(add: engine_pb2.AddRequest, facts: Facts) -> None:
        path = f"{message}.{field}" if message else field
        engine_requests.change(add, path, value(facts) if callable(value) else value)

    return change


def _stop(
    number: str, words: str, field: str, own: dict[str, Any] | None, wire: dict[str, Any] | None, engine: Any
) -> Row:
    return Row(
        f"{number} {words}",
        field,
        (lambda facts: Spec(text="hi", stop=Stop(**own))) if own is not None else None,
        (lambda facts: json.dumps(wire)) if wire is not None else None,
        engine=engine,
    )


def _ids(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _searched(
    width: int = 2, length_penalty: float = 1.0, sampling: EngineSampling = NO_SAMPLING, **fields: Any
) -> Callable[[engine_pb2.AddRequest, Facts], None]:
    """Has the engine be asked for a search, with other fields beside it."""

    def change(add: engine_pb2.AddRequest, facts: Facts) -> None:
        changed = {"beam_search": BeamSearch(width, length_penalty), "sampling": sampling, **fields}
        for field, value in changed.items():
            engine_requests.change(add, field, value)

    return change


_DEEP = '{"items": ' * 65 + "{}" + "}" * 65
_LONG = json.dumps({"title": "x" * (256 << 10)})

ROWS: list[Row] = [
    Row("45 empty prompt", "t", lambda facts: Spec(text=""), prompt=b"", engine=_set("", "prompt_token_ids", b"")),
    Row("47 prompt that is not UTF-8", "text_input", prompt=b"\xff\xfe"),
    Row("no prompt", "prompt", lambda facts: Spec()),
    Row("56 id at the vocabulary's end", "token_ids", lambda facts: Spec(token_ids=Ids(ids=[facts.vocabulary])),
        engine=_set("", "prompt_token_ids", lambda facts: _ids(facts.vocabulary))),
    Row("56 id 2^31", "token_ids", lambda facts: Spec(token_ids=Ids(ids=[1 << 31])),
        engine=_set("", "prompt_token_ids", _ids(1 << 31))),
    Row("56 id 2^32-1", "token_ids", lambda facts: Spec(token_ids=Ids(ids=[(1 << 32) - 1])),
        engine=_set("", "prompt_token_ids", _ids((1 << 32) - 1))),
    Row("58 no ids", "token_ids", lambda facts: Spec(token_ids=Ids()), engine=_set("", "prompt_token_ids", b"")),
    Row("61 a prompt of the context's length", "token",
        lambda facts: Spec(token_ids=Ids(ids=[5] * (facts.context + 1))), engine=_set("", "prompt_token_ids",
        lambda facts: _ids(*[5] * (facts.context + 1)))),
    Row("61 a text beyond the context", "text", lambda facts: Spec(text="~" * 8000), prompt=b"~" * 8000),
    _stop("62 prompt and output beyond the context", "", "max_tokens", {"max_tokens": 100_000},
        {"max_tokens": 100_000}, _set("stop", "max_tokens", lambda facts: facts.context)),
    _stop("64 max_tokens", "0", "max_tokens", {"max_tokens": 0}, {"max_tokens": 0}, _set("stop", "max_tokens", 0)),
    _stop("64 max_tokens", "-1", "max_tokens", None, {"max_tokens": -1}, None),
    _stop("64 max_tokens", "2^31", "max_tokens", {"max_tokens": 1 << 31}, {"max_tokens": 1 << 31},
        _set("stop", "max_tokens", 1 << 31)),
    _stop("64 min_tokens", "above max_tokens", "min_tokens", {"max_tokens": 4, "min_tokens": 5},
        {"max_tokens": 4, "min_tokens": 5}, _set("stop", "min_tokens", 1 << 20)),
    _number("66", "temperature", -1.0),
    _number("66", "temperature", math.nan, wire="nan"),
    _number("66", "temperature", math.inf, wire="inf"),
    _number("66", "temperature", -math.inf, wire="-inf"),
    _number("66", "temperature", 1e-40),
    _number("67", "top_p", 0.0),
    _number("67", "top_p", 1.1),
    _number("67", "top_p", math.nan, wire="nan"),
    _number("68", "top_k", -2),
    _number("68", "top_k", lambda facts: facts.vocabulary + 1),
    _number("68", "top_k", (1 << 31) - 1, wire=1 << 31),
    _number("69", "min_p", 2.0),
    _number("no", "top_n_sigma", -0.5),
    _number("no", "top_n_sigma", 101.0),
    _number("no", "top_n_sigma", math.nan, wire="nan"),
    _number("70", "presence_penalty", math.nan, wire="nan"),
    _number("70", "frequency_penalty", 1e38, wire=1e39),
    _number("71", "repetition_penalty", 0.0),
    Row("73 seed -1", "seed", sampling=lambda facts: '{"seed": -1}'),
    Row("73 seed 2^64", "seed", sampling=lambda facts: '{"seed": 18446744073709551616}'),
    Row("bias of no token", "logit_bias",
        lambda facts: Spec(text="hi", sampling=Sampling(logit_bias={facts.vocabulary: 1.0})),
    lambda facts: json.dumps({"logit_bias": {facts.vocabulary: 1.0}}), engine=_set("sampling", "logit_bias_ids",
        _ids(5))),
    Row("bias of one token in two spellings", "logit_bias", sampling=lambda facts: '{"logit_bias": {"5": 1, "05": 2}}'),
    _stop("74 stop", "empty", "stop", {"strings": [""]}, {"stop": [""]}, _set("stop", "strings", (b"",))),
    _stop("75 stop", "1,000 of them", "stop", {"strings": ["x"] * 1000}, {"stop": ["x"] * 1000},
        _set("stop", "strings", (b"x",) * 1000)),
    _stop("76 stop", "of 1 MiB", "stop", {"strings": ["x" * (1 << 20)]}, {"stop": "x" * 2000},
        _set("stop", "strings", (b"x" * (1 << 20),))),
    Row("stop token at the vocabulary's end", "stop",
        lambda facts: Spec(text="hi", stop=Stop(token_ids=[facts.vocabulary])),
    lambda facts: json.dumps({"stop_token_ids": [facts.vocabulary]}), engine=_set("stop", "token_ids",
        lambda facts: _ids(facts.vocabulary))),
    _stop("78 bad word", "empty", "bad_words", {"bad_words": [""]}, {"bad_words": [""]}, None),
    Row("78 bad word of no token", "bad_words",
        engine=_set("sampling", "bad_words", lambda facts: (_ids(facts.vocabulary),))),
    Row("79 n 0", "n", lambda facts: Spec(text="hi", n=0), lambda facts: '{"n": 0}', engine=_set("", "n", 0)),
    Row("79 n -1", "n", sampling=lambda facts: '{"n": -1}'),
    Row("79 n 10^9", "n", lambda facts: Spec(text="hi", n=10**9), lambda facts: '{"n": 1000000000}',
        engine=_set("", "n", 10**9)),
    Row("79 best_of below n", "best_of", sampling=lambda facts: '{"best_of": 1, "n": 2}'),
    Row("83 logprobs 21", "logprobs", lambda facts: Spec(text="hi", logprobs=21), lambda facts: '{"logprobs": 21}',
        engine=_set("", "num_logprobs", 21)),
    Row("83 logprobs -1", "logprobs", sampling=lambda facts: '{"logprobs": -1}'),
    Row("83 logprobs 10^9", "logprobs", lambda facts: Spec(text="hi", logprobs=10**9),
        lambda facts: '{"logprobs": 1000000000}', engine=_set("", "num_logprobs", 10**9)),
    Row("85 prompt_logprobs 21", "prompt_logprobs", lambda facts: Spec(text="hi", prompt_logprobs=21),
        engine=_set("", "num_prompt_logprobs", 21)),
    Row("priority 101", "priority", lambda facts: Spec(text="hi", priority=101)),
    Row("9 drafts", "speculation.max_drafts",
        lambda facts: Spec(text="hi", speculation=generation_pb2.Speculation(max_drafts=9)),
        engine=_set("", "max_drafts", 9)),
    Row("drafts of a server that has none", "speculation.max_drafts",
        lambda facts: Spec(text="hi", speculation=generation_pb2.Speculation(max_drafts=2))),
    Row("0 drafts", "speculation.max_drafts",
        lambda facts: Spec(text="hi", speculation=generation_pb2.Speculation(max_drafts=0))),
    Row("speculation without a word", "speculation",
        lambda facts: Spec(text="hi", speculation=generation_pb2.Speculation())),
    Row("no speculation that is not off", "speculation.off",
        lambda facts: Spec(text="hi", speculation=generation_pb2.Speculation(off=False))),
    Row("time limit 0", "time_limit", lambda facts: Spec(text="hi", time_limit=duration_pb2.Duration())),
    Row("detail of a trace that there is not", "trace_detail", lambda facts: Spec(text="hi", trace_detail=99)),  # type: ignore[arg-type]
    Row("effort that there is not", "reasoning_effort", lambda facts: Spec(text="hi", reasoning_effort=99)),  # type: ignore[arg-type]
    Row("salt of 257 bytes", "cache_salt", lambda facts: Spec(text="hi", cache_salt="s" * 257),
        engine=_set("", "cache_salt", b"s" * 257)),
    Row("82 10^6 beams", "beam_search.width", lambda facts: Spec(text="hi", beam_search={"width": 10**6}),
        engine=_searched(width=10**6)),
    Row("82 no beam", "beam_search.width", lambda facts: Spec(text="hi", beam_search={}), engine=_searched(width=0)),
    Row("82 10^6 beams of vLLM's", "best_of", sampling=lambda facts: '{"use_beam_search": true, "best_of": 1000000}'),
    Row("82 fewer beams than outputs", "n", lambda facts: Spec(text="hi", n=3, beam_search={"width": 2}),
        engine=_searched(n=3)),
    Row("82 beams with a length penalty that is no number", "length_penalty",
        lambda facts: Spec(text="hi", beam_search={"width": 2, "length_penalty": math.nan}),
        lambda facts: '{"use_beam_search": true, "length_penalty": 11}', engine=_searched(length_penalty=math.nan)),
    Row("82 beams with a temperature", "temperature",
        lambda facts: Spec(text="hi", beam_search={"width": 2}, sampling=Sampling(temperature=0.5)),
        lambda facts: '{"use_beam_search": true, "temperature": 0.5}',
        engine=_searched(sampling=EngineSampling(temperature=0.5))),
    Row("82 beams with a penalty", "repetition_penalty",
        lambda facts: Spec(text="hi", beam_search={"width": 2}, sampling=Sampling(repetition_penalty=1.1)),
        lambda facts: '{"use_beam_search": true, "repetition_penalty": 1.1}'),
    Row("82 beams with a form", "structured_output",
        lambda facts: Spec(text="hi", beam_search={"width": 2}, structured_output={"regex": "a"}),
        engine=_searched(structured_output=StructuredOutput("regex", "a"))),
    Row("82 beams with bad words", "bad_words",
        lambda facts: Spec(text="hi", beam_search={"width": 2}, stop=Stop(bad_words=["a"])),
        engine=_searched(sampling=EngineSampling(temperature=0.0, bad_words=(_ids(1),)))),
    Row("82 beams with 17 stop tokens", "token_ids",
        lambda facts: Spec(text="hi", beam_search={"width": 2}, stop=Stop(token_ids=range(1, 18)))),
    Row("82 beams that end somehow", "early_stopping",
        lambda facts: Spec(text="hi", beam_search={"width": 2, "early_stopping": 9}),
        lambda facts: '{"use_beam_search": true, "early_stopping": "sometimes"}'),
    Row("82 vLLM's length penalty without beams", "length_penalty", sampling=lambda facts: '{"length_penalty": 2}'),
    Row("79 best_of 21", "best_of", lambda facts: Spec(text="hi", best_of=21), lambda facts: '{"best_of": 21}',
        engine=_set("", "best_of", 21)),
    Row("79 best_of 0", "best_of", lambda facts: Spec(text="hi", best_of=0), lambda facts: '{"best_of": 0}'),
    Row("79 best_of and beams", "best_of", lambda facts: Spec(text="hi", best_of=2, beam_search={"width": 2}),
        engine=_searched(best_of=2)),
    Row("87 no regex", "regex", lambda facts: Spec(text="hi", structured_output={"regex": ""}),
        lambda facts: '{"guided_regex": ""}', engine=_set("", "structured_output", StructuredOutput("regex"))),
    Row("88 two forms", "guided_choice", sampling=lambda facts: '{"guided_regex": "a", "guided_choice": ["a"]}'),
    Row("89 a form of nothing", "structured_output", lambda facts: Spec(text="hi", structured_output={})),
    Row("89 no choice", "choice", lambda facts: Spec(text="hi", structured_output={"choice": {}}),
        lambda facts: '{"guided_choice": []}',
        engine=_set("", "structured_output", StructuredOutput("choice", "[]"))),
    Row("90 schema 65 deep", "structured", lambda facts: Spec(text="hi", structured_output={"json_schema": _DEEP}),
        lambda facts: json.dumps({"structured_outputs": {"json": _DEEP}}),
        engine=_set("", "structured_output", StructuredOutput("json_schema", _DEEP))),
    Row("90 schema of 256 KiB", "structured", lambda facts: Spec(text="hi", structured_output={"json_schema": _LONG}),
        engine=_set("", "structured_output", StructuredOutput("json_schema", _LONG))),
    Row("55 JSON cut off", "sampling_parameters", sampling=lambda facts: '{"max_tokens": '),
    Row("55 JSON with a key twice", "sampling_parameters", sampling=lambda facts: '{"top_p": 1, "top_p": 0.5}'),
    Row("55 JSON 100,000 deep", "sampling_parameters",
        sampling=lambda facts: '{"stop": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    Row("55 JSON with 5,000 digits", "sampling_parameters",
        sampling=lambda facts: '{"max_tokens": ' + "9" * 5000 + "}"),
    Row("55 JSON NaN", "sampling_parameters", sampling=lambda facts: '{"temperature": NaN}'),
    Row("55 JSON that is no object", "sampling_parameters", sampling=lambda facts: "[1]"),
    Row("51 unknown parameter", "dream", sampling=lambda facts: '{"dream": 1}'),
]  # fmt: skip
