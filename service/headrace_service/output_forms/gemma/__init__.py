"""Calls as <|tool_call>call:NAME{key:value,...}<tool_call|>: Gemma 4.

`grammar` has the markers and holds a model to the form, `reader` makes parts of an output.
"""

from headrace_service.output_forms.gemma.grammar import MARKERS, OPEN, grammar, why_not_strict
from headrace_service.output_forms.gemma.reader import GemmaReader

__all__ = ["MARKERS", "OPEN", "GemmaReader", "grammar", "why_not_strict"]
