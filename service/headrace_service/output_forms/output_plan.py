"""How the outputs of one conversation are read, as a value that travels with the request.

Any service process, of this version or a later one, must read an output as the first one did:
fields may be added with defaults, never changed.
"""

from __future__ import annotations

import msgspec

# Stands for the first special token that is a marker. No decoded text has half of a surrogate pair.
_FIRST_STAND_IN = 0xDC00


class KnownTool(msgspec.Struct, frozen=True, array_like=True):
    """A tool as a reader of calls knows it: its name, and which arguments are written as text."""

    name: str
    text_parameters: tuple[str, ...] = ()


class OutputPlan(msgspec.Struct, frozen=True):
    """What to look for in outputs, besides text.

    Attributes:
        call_format: how calls are written; "": none are looked for.
        tools: those that the model may call.
        special_markers: markers that are special tokens: id and text.
        reasoning: markers that begin and end reasoning; None: none is looked for.
        begins_inside: whether the prompt ends within reasoning.
        has_channels: whether outputs are messages of harmony, with reasoning among them.
        within_channel: the channel of the message of harmony in which the prompt ends; "": it ends
            in the header of one.
    """

    call_format: str = ""
    tools: tuple[KnownTool, ...] = ()
    special_markers: tuple[tuple[int, str], ...] = ()
    reasoning: tuple[str, str] | None = None
    begins_inside: bool = False
    has_channels: bool = False
    within_channel: str = ""

    def stand_ins(self) -> dict[int, str]:
        """Returns by id what stands for a special token in the text that readers are fed."""
        return {token: chr(_FIRST_STAND_IN + place) for place, (token, _) in enumerate(self.special_markers)}
