"""JSON Schemas of our own making, any number of them, and all different."""

from __future__ import annotations

import json
import random
from typing import Any

# The least that an object with a property takes.
_TOKENS_PER_ITEM = 2
_WORDS = "name age city tags price unit count owner state note path size kind step rate zone".split()


def make_schema(seed: int, depth: int = 3) -> dict[str, Any]:
    """A schema of an object, as applications write them: nested, with enums and bounds."""
    draw = random.Random(seed)
    schema = _object(draw, depth)
    if draw.random() < 0.3:
        schema["$defs"] = {"shared": _object(draw, 1)}
        schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
    schema["title"] = f"schema {seed}"
    return schema


def long_schema(seed: int, num_tokens: int) -> str:
    """JSON text of a schema of which no answer is over before `num_tokens` tokens."""
    items = make_schema(seed)
    items["required"] = list(items["properties"])
    definitions = items.pop("$defs", None)
    schema = {"type": "array", "items": items, "minItems": num_tokens // _TOKENS_PER_ITEM + 1}
    return json.dumps(schema | ({"$defs": definitions} if definitions else {}))


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": draw.randint(1, 12)},
        {"type": "string", "pattern": draw.choice(["^[a-z]{1,6}$", "^[A-Z][0-9]{2,4}$", "^(on|off)-[0-9]$"])},
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(1, 999)},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"enum": draw.sample(["red", "green", "blue", 1, 2, None, True], draw.randint(1, 4))},
        {"const": draw.choice(["fixed", 7, None])},
        {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
        {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])},
    ]
    if depth > 0:
        items = {"type": "array", "items": _value(draw, depth - 1), "maxItems": draw.randint(1, 3)}
        return draw.choice([*kinds, items, items, _object(draw, depth), _object(draw, depth)])
    return draw.choice(kinds)
