"""How many tokens a request took, as OpenAI reports them.

Owns the sum over the generations of one request: a request of several prompts has one for each.
"""

from __future__ import annotations

from typing import Any

from headrace_protos.engine.v1 import engine_pb2


class Usage:
    """The tokens of one request so far."""

    def __init__(self) -> None:
        self._prompt = self._output = self._cached = self._reasoning = 0

    def add(self, done: engine_pb2.RequestDone, reasoning_tokens: int, *, only_scores: bool) -> None:
        """Adds a generation that has ended; one that only scores a prompt has no output."""
        self._reasoning += reasoning_tokens
        self._prompt += done.prompt_tokens
        self._output += 0 if only_scores else done.output_tokens
        self._cached += done.cached_tokens

    def report(self) -> dict[str, Any]:
        """Returns the `usage` object."""
        report: dict[str, Any] = {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._output,
            "total_tokens": self._prompt + self._output,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
        if self._reasoning:
            report["completion_tokens_details"] = {"reasoning_tokens": self._reasoning}
        return report
