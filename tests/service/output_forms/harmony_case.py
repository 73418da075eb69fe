"""A vocabulary of bytes and harmony's special tokens, and outputs written with them."""

from __future__ import annotations

import re

from headrace_service.output_forms.harmony import MARKERS
from headrace_service.output_forms.model_form import ModelForm
from headrace_service.output_forms.output_plan import KnownTool, OutputPlan
from headrace_service.output_forms.output_reader import OutputReader, merged
from headrace_service.output_forms.parts import Part

# Tokens of one byte, an end-of-text token, then the markers.
END = 256
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [marker.encode() for marker in MARKERS]
IDS = {marker: END + 1 + place for place, marker in enumerate(MARKERS)}
TEMPLATE = "tools <|start|><|channel|><|message|> reasoning_effort"
_SPLIT = re.compile(f"({'|'.join(map(re.escape, MARKERS))})")


def encode(text: str) -> list[int]:
    """The tokens of a text in which markers are special tokens."""
    return [token for piece in _SPLIT.split(text) for token in ([IDS[piece]] if piece in IDS else piece.encode())]


def form_of(template: str = TEMPLATE, wanted: str = "auto") -> ModelForm:
    return ModelForm.of(template, encode, range(END, len(TOKENS)), wanted)


def plan_of(*tools: str, within: str = "") -> OutputPlan:
    special = tuple((token, marker) for marker, token in IDS.items())
    known = tuple(KnownTool(name) for name in tools)
    return OutputPlan("harmony" if tools else "", known, special, has_channels=True, within_channel=within)


def feed(reader: OutputReader, text: str) -> None:
    """Gives a reader a text whole, but for its markers."""
    for piece in _SPLIT.split(text):
        if piece in IDS:
            reader.feed_marker(IDS[piece])
        elif piece:
            reader.feed(1, piece)


def read(plan: OutputPlan, pieces: list[str], shows_special: bool = False) -> list[Part]:
    """Returns the parts of an output that arrives in these pieces; each run of a kind is one."""
    reader, parts = OutputReader(plan, "request/0", shows_special), []
    for piece in pieces:
        feed(reader, piece)
        parts += reader.take()
    reader.finish()
    return merged([*parts, *reader.take()])


def units(text: str) -> list[str]:
    """An output in its smallest pieces: markers and characters."""
    return [unit for piece in _SPLIT.split(text) for unit in ([piece] if piece in IDS else list(piece))]
