"""Sampling parameters by vLLM's names, into a GenerationSpec.

Owns the table of names, with the types they take, and what fields of GenerationSpec are called in a
request. A value may come as a string, which clients of vLLM's backend send for all of them. A name
that is not in the table is refused, and so is one whose effect this server does not have, unless
its value asks for no effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from headrace.v1 import generation_pb2
from headrace_request.sampling import Sampling
from headrace_service import errors, foreign_forms
from headrace_service.kserve.language_models import asked

Spec = generation_pb2.GenerationSpec
# vLLM's own default, on which its clients rely.
DEFAULT_MAX_TOKENS = 16
_MAX_FLOAT32 = 3.4028235e38
_WHERE = "sampling_parameters"
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
# One way to write each number: two keys of an object are then two numbers.
_KEY = re.compile(r"0|-?[1-9][0-9]{0,39}")

_NAMES: Final[Mapping[str, str]] = {
    **{f"spec.{name}": name for name in ("n", "logprobs", "best_of")},
    **{f"spec.sampling.{field.name}": field.name for field in msgspec.structs.fields(Sampling)},
    "spec.sampling.logit_bias": "logit_bias",
    **{f"spec.stop.{name}": name for name in ("max_tokens", "min_tokens", "bad_words")},
    "spec.stop.strings": "stop",
    "spec.stop.token_ids": "stop_token_ids",
    "spec.beam_search.length_penalty": "length_penalty",
}
_FORMS: Final = "structured_outputs guided_decoding guided_json guided_regex guided_choice guided_grammar".split()


class Parameter(NamedTuple):
    """One sampling parameter of a request.

    Attributes:
        field: where its caller gave it.
        value: as it came.
    """

    field: str
    value: Any


Parameters = Mapping[str, Parameter]


def in_tensor(values: Mapping[str, Any]) -> dict[str, Parameter]:
    """Returns the parameters of the tensor `sampling_parameters`."""
    return {name: Parameter(f"{_WHERE}.{name[:64]}", value) for name, value in values.items()}


def of_request(values: Mapping[str, Any]) -> dict[str, Parameter]:
    """Returns those that are parameters of the request itself."""
    return {name: Parameter(f"parameters[{name[:64]}]", value) for name, value in values.items()}


def names(parameters: Parameters) -> dict[str, str]:
    """What fields of GenerationSpec are called by a caller who gave some parameters."""
    form = next((name for name in _FORMS if name in parameters), _FORMS[0])
    width = "best_of" if "best_of" in parameters else "n"
    return {
        "spec.text": "text_input",
        **{field: _field(parameters, name) for field, name in _NAMES.items()},
        **foreign_forms.names(_field(parameters, form)),
        "spec.beam_search.width": _field(parameters, width),
        "spec.priority": "parameters[priority]",
        "spec.time_limit": "parameters[timeout]",
    }


def fill(spec: Spec, parameters: Parameters) -> None:
    """Puts sampling parameters into a spec.

    Raises:
        ServiceError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the parameter.
    """
    spec.stop.max_tokens = DEFAULT_MAX_TOKENS
    given = {name: one for name, one in parameters.items() if one.value is not None and one.value != "None"}
    for name, (field, value) in given.items():
        if name in _SETTERS:
            _SETTERS[name](spec, field, value)
        elif name in _WITHOUT_EFFECT:
            _check_without_effect(field, value, _WITHOUT_EFFECT[name])
        elif name in _UNBUILT:
            raise asked.unbuilt(field)
        else:
            raise errors.invalid_field(field, "is not known")
    _fill_search(spec, given)


def _field(parameters: Parameters, name: str) -> str:
    """Returns what the caller calls a parameter; one that is not given belongs in the tensor."""
    return parameters[name].field if name in parameters else f"{_WHERE}.{name}"


# -- values


def _integer(field: str, value: Any) -> int:
    if isinstance(value, bool):
        raise errors.invalid_field(field, "must be an integer")
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    raise errors.invalid_field(field, "must be an integer")


def _key(field: str, key: str) -> int:
    """Returns the number that a key of an object is.

    "05" and "+5" are refused, which would be the same as "5".
    """
    if not _KEY.fullmatch(key):
        raise errors.invalid_field(field, "must be an integer, without leading zeros, spaces and plus sign")
    return int(key)


def _number(field: str, value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise errors.invalid_field(field, "must be a number") from None
    if not math.isfinite(number) or abs(number) > _MAX_FLOAT32:
        raise errors.invalid_field(field, "must be a finite number that float32 holds")
    return number


def _truth(field: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise errors.invalid_field(field, "must be true or false")


def _strings(field: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(entry, str) for entry in values):
        raise errors.invalid_field(field, "must be a string or a list of strings")
    return values


def _token_ids(field: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise errors.invalid_field(field, "must be a list of token ids")
    return [
        asked.unsigned(_integer(f"{field}[{index}]", entry), f"{field}[{index}]") for index, entry in enumerate(value)
    ]


# -- parameters


def _float_setter(name: str) -> Callable[[Spec, str, Any], None]:
    return lambda spec, field, value: setattr(spec.sampling, name, _number(field, value))


def _logit_bias(spec: Spec, field: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise errors.invalid_field(field, "must be an object of token ids and biases")
    for token, bias in value.items():
        at = f"{field}[{token[:16]}]"
        spec.sampling.logit_bias[asked.unsigned(_key(at, token), at)] = _number(at, bias)


def _form(spec: Spec, field: str, value: Any) -> None:
    """Sets the form of outputs from an object of vLLM's, or from its JSON text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise errors.invalid_field(field, "must be an object, or its JSON text") from None
    if not isinstance(value, dict):
        raise errors.invalid_field(field, "must be an object, or its JSON text")
    _set_form(spec, field, foreign_forms.read_vllm(value, field))


def _form_setter(name: str) -> Callable[[Spec, str, Any], None]:
    return lambda spec, field, value: _set_form(spec, field, foreign_forms.VLLM_FORMS[name](value, field))


def _set_form(spec: Spec, field: str, form: foreign_forms.Output | None) -> None:
    if form is None:
        return
    if spec.HasField("structured_output"):
        raise errors.invalid_field(field, "must not be given beside another form: an output has one")
    spec.structured_output.CopyFrom(form)


_SETTERS: dict[str, Callable[[Spec, str, Any], None]] = {
    # vLLM calls them as we do.
    **{field.name: _float_setter(field.name) for field in msgspec.structs.fields(Sampling) if field.type is float},
    "top_k": lambda spec, field, value: setattr(spec.sampling, "top_k", asked.signed(_integer(field, value), field)),
    "seed": lambda spec, field, value: setattr(spec.sampling, "seed", asked.seed(_integer(field, value), field)),
    "logit_bias": _logit_bias,
    "n": lambda spec, field, value: setattr(spec, "n", asked.unsigned(_integer(field, value), field)),
    "logprobs": lambda spec, field, value: setattr(spec, "logprobs", asked.unsigned(_integer(field, value), field)),
    "stop": lambda spec, field, value: spec.stop.strings.extend(_strings(field, value)),
    "bad_words": lambda spec, field, value: spec.stop.bad_words.extend(_strings(field, value)),
    "stop_token_ids": lambda spec, field, value: spec.stop.token_ids.extend(_token_ids(field, value)),
    "max_tokens": lambda spec, field, value: setattr(
        spec.stop, "max_tokens", asked.unsigned(_integer(field, value), field)
    ),
    "min_tokens": lambda spec, field, value: setattr(
        spec.stop, "min_tokens", asked.unsigned(_integer(field, value), field)
    ),
    "ignore_eos": lambda spec, field, value: setattr(spec.stop, "ignore_eos", _truth(field, value)),
    "include_stop_str_in_output": lambda spec, field, value: setattr(
        spec.stop, "include_stop_string", _truth(field, value)
    ),
    "skip_special_tokens": lambda spec, field, value: setattr(spec, "skip_special_tokens", _truth(field, value)),
    # Its older name, and its newer one; then the oldest, one for each form.
    "guided_decoding": _form,
    "structured_outputs": _form,
    **{f"guided_{name}": _form_setter(name) for name in ("json", "regex", "choice", "grammar")},
    "best_of": lambda spec, field, value: setattr(
        spec, "best_of", asked.unsigned(_at_least_one(field, _integer(field, value)), field)
    ),
    # Read together once all are known.
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), lambda spec, field, value: None),
}
# Parameters of things that this server does not do, with the value that asks for nothing.
_WITHOUT_EFFECT: dict[str, Any] = {
    "detokenize": True,
    "spaces_between_special_tokens": True,
}
_UNBUILT = frozenset(
    "prompt_logprobs truncate_prompt_tokens "
    "logits_processors allowed_token_ids extra_args lora_name output_kind thinking_token_budget".split()
)


def _check_without_effect(field: str, value: Any, harmless: Any) -> None:
    read = _truth if isinstance(harmless, bool) else _number
    if read(field, value) != harmless:
        raise asked.unbuilt(f"{field} other than {str(harmless).lower()}")


def _at_least_one(field: str, value: int) -> int:
    if value < 1:
        raise errors.invalid_field(field, "must be at least 1")
    return value


def _fill_search(spec: Spec, given: Parameters) -> None:
    """Asks for a search if it is to be used.

    As in vLLM it is as wide as `best_of`, or else `n`, and its own parameters ask for nothing
    without it.
    """
    nothing = {"length_penalty": 1.0, "early_stopping": False, "use_beam_search": False}
    length, early, use = [given.get(name, Parameter(name, value)) for name, value in nothing.items()]
    penalty, early_stopping = _number(*length), _early_stopping(*early)
    if not _truth(*use):
        if penalty != 1:
            raise errors.invalid_field(length.field, "must be 1 without use_beam_search")
        if early_stopping != generation_pb2.EARLY_STOPPING_HEURISTIC:
            raise errors.invalid_field(early.field, "must be false without use_beam_search")
        return
    num_outputs = spec.n if spec.HasField("n") else 1
    if spec.HasField("best_of") and spec.best_of < num_outputs:
        raise errors.invalid_field(_field(given, "best_of"), f"must be at least n, {num_outputs}")
    spec.beam_search.width = spec.best_of if spec.HasField("best_of") else num_outputs
    spec.beam_search.length_penalty, spec.beam_search.early_stopping = penalty, early_stopping
    spec.ClearField("best_of")


def _early_stopping(field: str, value: Any) -> generation_pb2.EarlyStopping:
    if value == "never":
        return generation_pb2.EARLY_STOPPING_NEVER
    full = _truth(field, value)
    return generation_pb2.EARLY_STOPPING_FULL if full else generation_pb2.EARLY_STOPPING_HEURISTIC
