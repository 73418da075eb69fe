"""The form that each output of a request must have.

Owns the value as it travels: which form, and the text that says it. What such a text must be is
`structured_rules`; what it allows is compiled where tokens are known, in the backend
(`headrace_backend.structured_output`).
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Tag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of free text that has a form, as one entry of the form "structural_tags"."""

    # The text from which on the output has the form; at least one character.
    trigger: str
    # How the part begins, the trigger included.
    begin: str
    # JSON text of a JSON Schema, for what follows the beginning.
    json_schema: str
    # How the part ends.
    end: str = ""


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A form and its text. A field of headrace.v1.StructuredOutput is the form of the same name.

    Crosses to the engine by the order of its fields (`request.LAYOUT`).
    """

    form: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tags"]
    # The schema, the expression or the grammar as it was given; the choices as a JSON array of
    # strings; tags as a JSON array of `Tag`; "" for json_object. At most 256 KiB of UTF-8.
    text: str = ""
    # A grammar in Lark's notation of the whole output, in which `@answer` stands for the form; "":
    # the whole output has the form. At most 256 KiB of UTF-8.
    around: str = ""


def choice(texts: list[str]) -> StructuredOutput:
    """One of some texts."""
    return StructuredOutput("choice", msgspec.json.encode(texts).decode())


def structural_tags(tags: list[Tag]) -> StructuredOutput:
    """Free text in which parts have a form."""
    return StructuredOutput("structural_tags", msgspec.json.encode(tags).decode())
