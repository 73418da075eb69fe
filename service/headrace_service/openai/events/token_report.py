"""Log probabilities in the two forms of OpenAI's API.

Owns both forms, and what a token is called in them: its own bytes, and as text these with what is
no UTF-8 replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace_service.streams.wires import TokenLogprobs
from headrace_service.text.detokenizer import PieceTable

# JSON has no infinity; the number is vLLM's.
_LOWEST = -9999.0


class TokenReport:
    """Writes tokens of one model.

    Args:
        pieces: the bytes of each token.
    """

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces.pieces

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns the `logprobs` object of a chat's choice."""
        return {"content": [self._entry(token, one) for token, one in zip(token_ids, logprobs, strict=True)]}

    def text(self, token: int) -> str:
        """Returns a token's text."""
        return self._pieces[token].decode(errors="replace")

    def _entry(self, token: int, one: TokenLogprobs) -> dict[str, Any]:
        tops = [self._one(top, value) for top, value in zip(one.top_ids, one.top_logprobs, strict=True)]
        return {**self._one(token, one.sampled), "top_logprobs": tops}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._pieces[token]
        return {"token": piece.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(piece)}


class CompletionReport:
    """The `logprobs` object of one completion's choice, token by token.

    Args:
        report: what tokens are called.
    """

    __slots__ = ("_offset", "_report")

    def __init__(self, report: TokenReport) -> None:
        self._report = report
        self._offset = 0

    def of(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs | None]) -> dict[str, Any]:
        """Returns the object for the next tokens; offsets count characters from the first on.

        A token without log probabilities is the first of a prompt.
        """
        tokens: list[str] = []
        own: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, one in zip(token_ids, logprobs, strict=True):
            text = self._report.text(token)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            own.append(None if one is None else max(one.sampled, _LOWEST))
            tops.append(None if one is None else self._tops(token, one))
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}

    def _tops(self, token: int, one: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the token itself."""
        tops = {
            self._report.text(top): max(value, _LOWEST)
            for top, value in zip(one.top_ids, one.top_logprobs, strict=True)
        }
        tops.setdefault(self._report.text(token), max(one.sampled, _LOWEST))
        return tops
