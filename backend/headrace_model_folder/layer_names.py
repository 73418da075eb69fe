"""Which linear layers a quantization names: exactly, by pattern, by the end or a part of a name.

Owns the rules of the formats and the guard in front of regular expressions, which come from a file that anybody may have written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace_model_folder.errors import InvalidModelFolder, shown

# Products of a decoder layer, in the order of a forward pass.
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
LM_HEAD = "lm_head"
# What a regular expression may hold: names have some 40 characters, so that the worst of these still ends in milliseconds.
_MOST_REPETITIONS = 4
_LONGEST_PATTERN = 512
# A repetition of what holds a repetition: takes exponential time.
_NESTED = re.compile(r"[+*}]\)*\)[+*{]")


def linear_layers(num_layers: int) -> list[str]:
    """Names of all products of the decoder layers."""
    return [f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in PROJECTIONS]


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression from a folder.

    Raises:
        InvalidModelFolder: It is none, or one that may take long.
    """
    repetitions = len(re.findall(r"[+*{]", pattern))
    if len(pattern) > _LONGEST_PATTERN or repetitions > _MOST_REPETITIONS or _NESTED.search(pattern):
        raise InvalidModelFolder(
            f"{where} has the pattern {shown(pattern)}: at most {_LONGEST_PATTERN} characters and {_MOST_REPETITIONS} repetitions, none inside another, are matched"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        raise InvalidModelFolder(f"{where} has {shown(pattern)}, which is no regular expression") from None


def names_part(name: str, entry: str) -> bool:
    """Whether an entry is a name, its beginning, its end, or a part of it, cut at dots."""
    return f".{entry}." in f".{name}."


def strings(value: object, where: str) -> Sequence[str]:
    """A list of strings; none if absent.

    Raises:
        InvalidModelFolder: Something else.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise InvalidModelFolder(f"{where} must be a list of strings, is {shown(value)}")
    return value
