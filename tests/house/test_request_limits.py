"""A request's limits are the same wherever they are checked or stated.

The places: services, the engine's socket, the engine, the protos' comments, what clients say of
their options.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tests.support.engine_requests import greedy_request

from headrace.v1.generation_pb2 import GenerationSpec
from headrace_backend.config import EngineConfig
from headrace_backend.engine.errors import RequestRefused
from headrace_backend.engine.limits.validation import RequestValidator
from headrace_backend.engine.request import ModelLimits
from headrace_backend.server.streams.incoming import read_add
from headrace_protos.engine.v1.engine_pb2 import AddRequest
from headrace_request import limits
from headrace_request.rule_kinds import Bounds
from headrace_request.sampling import Sampling
from headrace_service import validation
from headrace_service.errors import ServiceError
from headrace_service.resolved_spec import ModelFacts

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY = 4096
CONTEXT = 8192
BOUNDS = Bounds(VOCABULARY, CONTEXT, limits.MAX_OUTPUTS, max_drafts=limits.MAX_DRAFTS)
FACTS = ModelFacts("model", BOUNDS, 1 << 20, Sampling())
ENGINE = RequestValidator(ModelLimits(VOCABULARY, CONTEXT, (0,)), limits.MAX_OUTPUTS, has_text=True)


class Bounded(NamedTuple):
    """A value that has a limit: the limit, and how a caller and a service send so much of it.

    `beyond` is a value one step beyond it.
    """

    limit: float
    beyond: float
    spec: Callable[[Any], dict[str, Any]]
    add: Callable[[Any], dict[str, Any]]


def ids(count: int) -> bytes:
    return np.arange(1, count + 1, dtype="<u4").tobytes()


def sampled(name: str, limit: float, beyond: float) -> Bounded:
    """A number among the sampling parameters."""
    fields = lambda value: {"sampling": {name: value}}  # noqa: E731
    return Bounded(limit, beyond, fields, fields)


def counted(limit: int, spec: Callable[[Any], dict[str, Any]], add: Callable[[Any], dict[str, Any]]) -> Bounded:
    """A number of entries, bytes or outputs."""
    return Bounded(limit, limit + 1, spec, add)


def bias(entries: dict[int, float]) -> dict[str, Any]:
    values = np.array(list(entries.values()), "<f4").tobytes()
    return {"sampling": {"logit_bias_ids": np.array(list(entries), "<u4").tobytes(), "logit_bias_values": values}}


def many_biases(count: int) -> dict[int, float]:
    return dict.fromkeys(range(1, count + 1), 1.0)


def sequences(count: int, length: int = 1) -> dict[str, Any]:
    return {"sampling": {"bad_words": (ids(length),) * count}}


PRIORITY, PENALTY = limits.MAX_PRIORITY, limits.MAX_PENALTY
STRINGS, STRING_BYTES = limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_BYTES
BOUNDED: dict[str, Bounded] = {
    "n": counted(limits.MAX_OUTPUTS, lambda n: {"n": n}, lambda n: {"n": n}),
    "logprobs": counted(limits.MAX_LOGPROBS, lambda k: {"logprobs": k}, lambda k: {"num_logprobs": k}),
    "prompt logprobs": counted(
        limits.MAX_LOGPROBS, lambda k: {"prompt_logprobs": k}, lambda k: {"num_prompt_logprobs": k}
    ),
    "priority": counted(PRIORITY, lambda p: {"priority": p}, lambda p: {"priority": p}),
    "low priority": Bounded(-PRIORITY, -PRIORITY - 1, lambda p: {"priority": p}, lambda p: {"priority": p}),
    "drafts": counted(limits.MAX_DRAFTS, lambda k: {"speculation": {"max_drafts": k}}, lambda k: {"max_drafts": k}),
    "cache salt": counted(
        limits.MAX_CACHE_SALT_BYTES, lambda size: {"cache_salt": "s" * size}, lambda size: {"cache_salt": b"s" * size}
    ),
    "temperature": sampled("temperature", limits.MAX_TEMPERATURE, 101.0),
    "low temperature": sampled("temperature", limits.MIN_TEMPERATURE, 0.0099),
    "top_n_sigma": sampled("top_n_sigma", limits.MAX_TOP_N_SIGMA, 100.1),
    "repetition penalty": sampled("repetition_penalty", limits.MAX_REPETITION_PENALTY, 10.1),
    "low repetition penalty": sampled("repetition_penalty", limits.MIN_REPETITION_PENALTY, 0.0099),
    "presence penalty": sampled("presence_penalty", PENALTY, 2.1),
    "low presence penalty": sampled("presence_penalty", -PENALTY, -2.1),
    "frequency penalty": sampled("frequency_penalty", PENALTY, 2.1),
    "low frequency penalty": sampled("frequency_penalty", -PENALTY, -2.1),
    "biases": counted(
        limits.MAX_LOGIT_BIAS,
        lambda count: {"sampling": {"logit_bias": many_biases(count)}},
        lambda count: bias(many_biases(count)),
    ),
    "bias": Bounded(
        limits.MAX_BIAS, 100.1, lambda value: {"sampling": {"logit_bias": {5: value}}}, lambda value: bias({5: value})
    ),
    "stop strings": counted(
        STRINGS,
        lambda count: {"stop": {"strings": ["x"] * count}},
        lambda count: {"stop": {"strings": (b"x",) * count}},
    ),
    "bytes of a stop string": counted(
        STRING_BYTES,
        lambda size: {"stop": {"strings": ["x" * size]}},
        lambda size: {"stop": {"strings": (b"x" * size,)}},
    ),
    "stop tokens": counted(
        limits.MAX_STOP_TOKEN_IDS,
        lambda count: {"stop": {"token_ids": range(1, count + 1)}},
        lambda count: {"stop": {"token_ids": ids(count)}},
    ),
    "bad words": counted(
        limits.MAX_BAD_WORDS,
        lambda count: {"stop": {"bad_words": ["x"] * count}},
        lambda count: sequences(limits.ENCODINGS_PER_BAD_WORD * count),
    ),
    "bytes of a bad word": counted(
        limits.MAX_BAD_WORD_BYTES,
        lambda size: {"stop": {"bad_words": ["x" * size]}},
        # A token for each byte, and for what a tokenizer writes before the word.
        lambda size: sequences(1, size + limits.MAX_BAD_WORD_TOKENS - limits.MAX_BAD_WORD_BYTES),
    ),
}


def spec_with(fields: dict[str, Any]) -> GenerationSpec:
    spec = GenerationSpec(text="hi", **fields)
    spec.stop.max_tokens = 4
    return spec


def add_with(fields: dict[str, Any]) -> AddRequest:
    """Fields of `Request`, in those of its structs by their names."""
    request = greedy_request([1, 2], 4)
    for name, value in fields.items():
        if isinstance(value, dict):
            value = msgspec.structs.replace(getattr(request, name), **value)
        request = msgspec.structs.replace(request, **{name: value})
    return AddRequest(request_id="r", handle=1, request=request.encode())


PLACES: dict[str, Callable[[Bounded, float], object]] = {
    "service": lambda bounded, value: validation.resolve(spec_with(bounded.spec(value)), FACTS),
    "engine": lambda bounded, value: ENGINE.check(read_add(add_with(bounded.add(value)), 0)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", BOUNDED)
def test_every_place_takes_the_limit_and_nothing_beyond_it(name: str, place: str) -> None:
    bounded, check = BOUNDED[name], PLACES[place]
    check(bounded, bounded.limit)
    with pytest.raises((ServiceError, RequestRefused)) as refused:
        check(bounded, bounded.beyond)
    assert "INVALID_ARGUMENT" in str(getattr(refused.value, "code", refused.value))


def test_no_setting_allows_more_than_the_limits() -> None:
    model = pathlib.Path("model")
    EngineConfig(model=model, max_outputs=limits.MAX_OUTPUTS, max_time_limit_s=limits.MAX_TIME_LIMIT_S)
    for field, limit in (("max_outputs", limits.MAX_OUTPUTS), ("max_time_limit_s", limits.MAX_TIME_LIMIT_S)):
        with pytest.raises(ValueError, match=field):
            EngineConfig(model=model, **{field: limit + 1})


# What is said of each field, for people: as a range, or as a number of entries or bytes.
BETWEEN = {
    "n": f"1 to {limits.MAX_OUTPUTS}",
    "logprobs": f"0 to {limits.MAX_LOGPROBS}",
    "prompt_logprobs": f"0 to {limits.MAX_LOGPROBS}",
    "priority": f"-{PRIORITY} to {PRIORITY}",
    "max_drafts": f"1 to {limits.MAX_DRAFTS}",
    "temperature": f"0, or {limits.MIN_TEMPERATURE:g} to {limits.MAX_TEMPERATURE:g}",
    "top_n_sigma": f"0 to {limits.MAX_TOP_N_SIGMA:g}",
    "repetition_penalty": f"{limits.MIN_REPETITION_PENALTY:g} to {limits.MAX_REPETITION_PENALTY:g}",
    "presence_penalty": f"-{PENALTY:g} to {PENALTY:g}",
    "frequency_penalty": f"-{PENALTY:g} to {PENALTY:g}",
    "logit_bias": f"-{limits.MAX_BIAS:g} to {limits.MAX_BIAS:g}",
}
AT_MOST = {
    "logit_bias": f"{limits.MAX_LOGIT_BIAS:,} entries",
    "cache_salt": f"{limits.MAX_CACHE_SALT_BYTES} bytes",
    "idempotency_key": f"{limits.MAX_IDEMPOTENCY_KEY_BYTES} bytes",
    "time_limit": f"{limits.MAX_TIME_LIMIT_S // 3600} hours",
    "strings": f"{STRINGS}",
    "token_ids": f"{limits.MAX_STOP_TOKEN_IDS}",
    "bad_words": f"{limits.MAX_BAD_WORDS}",
}
EACH = {
    "strings": f"1 to {STRING_BYTES} ",
    "bad_words": f"1 to {limits.MAX_BAD_WORD_BYTES} ",
}
# A statement of a number or range that some field has.
STATEMENT = re.compile(r"(-?[\d.]+(?:, or [\d.]+)? to -?[\d.]*\d|at most [\d,]*\d|up to \d+)", re.IGNORECASE)


def expected(field: str) -> set[str]:
    """Statements about a field that are true."""
    most = [AT_MOST[field].split(" ")[0]] if field in AT_MOST else []
    each = [EACH[field].strip()] if field in EACH else []
    between = [BETWEEN[field]] if field in BETWEEN else []
    return {*between, *each, *(f"at most {number}" for number in most), *(f"up to {number}" for number in most)}


def proto_comments() -> Iterator[tuple[str, str]]:
    """Each field of the public generation messages with its comment."""
    declared = re.compile(r"((?:^ *//.*\n)+) *(?:optional |repeated )?[\w.<>, ]+ (\w+) = \d+;", re.MULTILINE)
    for path in ("generation.proto", "inference.proto"):
        for comment, field in declared.findall((ROOT / "protos/headrace/v1" / path).read_text()):
            yield field, " ".join(line.strip(" /") for line in comment.splitlines())


RENAMED = {
    "stop": "strings",
    "stop_token_ids": "token_ids",
    "stop_tokens": "token_ids",
    "outputs": "n",
    "bias": "logit_bias",
    "top_nsigma": "top_n_sigma",
}
GO_NAME = re.compile(r"// With(\w+) (.*(?:\n//.*)*)")
JAVA_NAME = re.compile(r"@param (\w+) (.*(?:\n +\*  .*)*)\n(?:.*\n)*?        public Builder (\w+)\(")
PYTHON_NAME = re.compile(r"^        (\w+): (.*)$", re.MULTILINE)


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("token_ids_only", "")


def client_comments() -> Iterator[tuple[str, str]]:
    """Each option of each client with what its documentation says."""
    for name, text in PYTHON_NAME.findall((ROOT / "clients/python/headrace/spec.py").read_text()):
        yield name, text
    for name, text in GO_NAME.findall((ROOT / "clients/go/options.go").read_text()):
        yield snake(name), text.replace("\n//", "")
    java = ROOT / "clients/java/src/main/java/io/github/headrace/GenerationOptions.java"
    for _, text, name in JAVA_NAME.findall(java.read_text()):
        yield snake(name), re.sub(r"\n +\* +", " ", text)


@pytest.mark.parametrize("comments", [proto_comments, client_comments])
def test_comments_state_the_limits_that_are_checked(comments: Callable[[], Iterator[tuple[str, str]]]) -> None:
    stated = {}
    for name, text in comments():
        field = RENAMED.get(name, name)
        if (true := expected(field)) and (found := {s.lower() for s in STATEMENT.findall(text)}):
            assert found <= true, f"{name}: {text}"
            stated[field] = stated.get(field, set()) | found
    # The walk finds them: every limited field is stated somewhere, and so is the size of a stop
    # string.
    assert set(stated) == {*BETWEEN, *AT_MOST}
    assert stated["strings"] >= {EACH["strings"].strip(), f"at most {STRINGS}"}


def test_limits_are_stated_in_one_place() -> None:
    """No other code has a constant of a limit's name."""
    names = "|".join(sorted(name for name in vars(limits) if name.isupper()))
    assigned = re.compile(rf"^_?(?:{names})\b.*=\s*-?\d", re.MULTILINE)
    assert assigned.search((ROOT / "both_sides/headrace_request/limits.py").read_text())
    others = [path for room in ("service", "backend", "both_sides") for path in (ROOT / room).rglob("*.py")]
    found = [path.relative_to(ROOT) for path in others if assigned.search(path.read_text())]
    assert found == [pathlib.Path("both_sides/headrace_request/limits.py")]
