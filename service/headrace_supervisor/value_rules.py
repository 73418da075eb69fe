"""What a setting's value must be, in a command line's words instead of pydantic's.

Owns one sentence for each kind of error that pydantic has for the types of our settings. Which
setting it was, where its value came from and what the value is, is said by who read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

_NUMBER = "must be a number"
_WHOLE_NUMBER = "must be a whole number"
_YES_OR_NO = "must be true or false"
SIZE_RULE = "must be a number of bytes, as in 20GiB or 512MiB"
_TABLE = "must be a table of settings"
# pydantic's kind of error -> the rule, with the names of what pydantic says about it.
_RULES: Mapping[str, str] = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "int_parsing": _WHOLE_NUMBER,
    "int_parsing_size": _WHOLE_NUMBER + " of fewer digits",
    "int_type": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": "must be a finite number",
    "bool_parsing": _YES_OR_NO,
    "bool_type": _YES_OR_NO,
    "literal_error": "must be {expected}",
    "string_type": "must be text",
    "path_type": "must be a path",
    "tuple_type": "must be text or a list",
    "byte_size": SIZE_RULE,
    "byte_size_unit": SIZE_RULE,
    "dict_type": _TABLE,
    "model_type": _TABLE,
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
}


# How pydantic begins what is in no table.
_SUBJECT = re.compile(r"^[A-Z][a-z]+ should ")


def rule_of(problem: ErrorDetails) -> str:
    """Returns the rule that a value broke, such as "must be at least 1".

    What a class of ours has against a value comes as it is.
    """
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    if problem["type"] in _RULES:
        return _RULES[problem["type"]].format_map({name: _shown(fact) for name, fact in problem.get("ctx", {}).items()})
    return _SUBJECT.sub("must ", problem["msg"])


def _shown(fact: Any) -> str:
    """A limit without a point where it is a whole number, words without quotes."""
    return f"{fact:.15g}" if isinstance(fact, float) else str(fact).replace("'", "")
