"""From a request's structured output to a grammar of llguidance's.

Owns how each form is written there, and the whitespace that JSON may have. What a caller's text
must be was checked before (`headrace_request.structured_rules`).
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from llguidance import LLMatcher

from headrace_request import json_schema
from headrace_request.structured_output import StructuredOutput, Tag

# Forms that are written in Lark's notation, all others as JSON.
_LARK_FORMS: Final = ("grammar", "choice", "structural_tags")
# What `StructuredOutput.around` calls the form.
_ANSWER: Final = "answer"


def grammar_of(asked: StructuredOutput) -> str:
    """The grammar of whole outputs, as llguidance reads it; what is wrong shows when compiled."""
    form = form_grammar(asked)
    if not asked.around:
        return form
    if asked.form in _LARK_FORMS:
        answer = {"lark_grammar": form}
    else:
        (answer,) = json.loads(form)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": asked.around}, {**answer, "name": _ANSWER}]})


def form_grammar(asked: StructuredOutput) -> str:
    """The grammar of the form alone, whatever stands around it."""
    match asked.form:
        case "json_schema":
            return schema_grammar(msgspec.json.decode(asked.text))
        case "json_object":
            return schema_grammar({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(asked.text)
        case "grammar":
            return LLMatcher.grammar_from_lark(asked.text)
        case "choice":
            texts = msgspec.json.decode(asked.text, type=list[str])
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, texts)))
        case "structural_tags":
            tags = msgspec.json.decode(asked.text, type=list[Tag])
            return LLMatcher.grammar_from_lark(_tags_grammar(tags))


def schema_grammar(schema: Any) -> str:
    """The grammar of JSON that a schema allows."""
    return LLMatcher.grammar_from_json_schema(json_schema.held(schema))


def _tags_grammar(tags: list[Tag]) -> str:
    """Free text, in which each trigger leads into its tag's form."""
    lines = [
        f"start: ({' | '.join(f'tag_{index}' for index in range(len(tags)))})* rest",
        "rest: TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    for index, tag in enumerate(tags):
        # A lazy lexeme ends where its text has come to the trigger, so free text can't contain one.
        lines.append(f"trigger_{index}[lazy]: TEXT {_quoted(tag.trigger)}")
        schema = json_schema.held(json.loads(tag.json_schema))
        parts = [_quoted(tag.begin.removeprefix(tag.trigger)), f"%json {json.dumps(schema)}", _quoted(tag.end)]
        lines.append(f"tag_{index}: trigger_{index} {' '.join(part for part in parts if part != _EMPTY)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A text as Lark has it between quotes."""
    return json.dumps(text, ensure_ascii=False)


_EMPTY: Final = _quoted("")
