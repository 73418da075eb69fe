"""The place of an output that may reason before it answers.

A section of reasoning is free: what has a grammar begins it behind the section, and a section whose
budget is spent is ended by its end marker, one forced token after the other. Without a grammar only
those draws have masks, so that reasoning within its budget costs nothing.

Owns which mask a draw has before, inside and behind the section. Does not own where the section is
(`reasoning_section`) nor the grammar (`output_place`).
"""

from __future__ import annotations

import copy
from array import array
from typing import Final

from headrace_backend.engine.output_grammar import COMPLETE, MASKED, Grammar, MaskOutcome, MaskState
from headrace_backend.structured_output.mask_bits import Words, add, remove
from headrace_backend.structured_output.output_place import MAX_AHEAD, CompiledGrammar, OutputPlace
from headrace_backend.structured_output.reasoning_section import ReasoningSection, Stage
from headrace_request.reasoning import Reasoning

# No output is so long.
_NEVER: Final = 1 << 62


def behind_reasoning(reasoning: Reasoning | None, answer: CompiledGrammar | None) -> Grammar | None:
    """The grammar of whole outputs, of which `answer` is that of what follows their reasoning.

    None: any token may be drawn everywhere.
    """
    if reasoning is None or (answer is None and reasoning.max_tokens is None):
        return answer
    return ReasoningGrammar(reasoning, answer)


class ReasoningGrammar:
    """A section of reasoning, and the grammar of what follows it."""

    def __init__(self, reasoning: Reasoning, answer: CompiledGrammar | None) -> None:
        """`answer` is the grammar behind the section; None: any text."""
        self._reasoning = reasoning
        self._answer = answer
        self.decides_ends = answer is not None
        self.first_masked = 0 if answer is not None else _next_forced(ReasoningSection(reasoning, False))

    def new_output(self) -> ReasoningPlace:
        """An output's place before its first token."""
        return ReasoningPlace(self._reasoning, self._answer)


class ReasoningPlace:
    """How far one output has come in its reasoning, and behind it."""

    def __init__(self, reasoning: Reasoning, grammar: CompiledGrammar | None) -> None:
        """No token was drawn. `grammar` is that of the answer; None: any text."""
        self._section = ReasoningSection(reasoning, at_beginning=grammar is not None)
        # The output's tokens that the section has seen; the last ones may not be drawn yet.
        self._known = array("i")
        self._end_marker = frozenset(reasoning.end_ids)
        self._grammar = grammar
        # Follows the answer; before a section the whole output, which may turn out to have none.
        self._answer = None if grammar is None else grammar.new_output()

    def copy(self) -> ReasoningPlace:
        """A place that may go another way."""
        copied = copy.copy(self)
        copied._section, copied._known = self._section.copy(), self._known[:]
        copied._answer = None if self._answer is None else self._answer.copy()
        return copied

    def fill_mask(
        self,
        words: Words,
        first: int,
        tokens: array[int],
        stop_token_ids: frozenset[int],
        min_tokens: int,
        looks_ahead: bool = False,
    ) -> MaskOutcome:
        """Writes the mask of the output's next draw, if it has one: `OutputPlace.fill_mask`."""
        position = first + len(tokens)
        if position < len(self._known):
            return self._fill_known(words, position)
        self._feed(first, tokens)
        section, grammar = self._section, self._grammar
        if section.forced is not None:
            words[:] = 0
            add(words, (section.forced,))
            if looks_ahead:
                self._look_ahead(position, stop_token_ids)
            return MaskOutcome(MaskState.MASKED, forced=self._known[position:] or None)
        if grammar is None:
            return MaskOutcome(MaskState.OPEN, next_masked=_next_forced(section))
        if section.stage is Stage.INSIDE:
            # The output ends with its answer.
            words[:] = -1
            remove(words, stop_token_ids - self._end_marker)
            return MASKED
        if section.stage is Stage.BEHIND:
            return self._answer_mask(words, first, tokens, stop_token_ids, min_tokens, looks_ahead)
        # What follows is the answer, as far as that can begin like a start marker, or one.
        outcome = self._answer_mask(words, first, tokens, stop_token_ids, min_tokens)
        if outcome is COMPLETE:
            return outcome
        if outcome is not MASKED:
            words[:] = 0
        add(words, (section.next_of_start,))
        return MASKED

    def answer_at(self, first: int, tokens: array[int]) -> tuple[OutputPlace, int, array[int], int] | None:
        """The place in the grammar of the answer, where the section is known to lie behind.

        Returns:
            The place, `first` and `tokens` as `OutputPlace.begin` takes them, and where in the
            output the answer begins; None if the section may not have ended yet, or any text may
            follow it.
        """
        if self._section.stage is not Stage.BEHIND or self._answer is None:
            return None
        begins = self._section.answer_begins
        return self._answer, max(first - begins, 0), tokens[max(begins - first, 0) :], begins

    def _feed(self, first: int, tokens: array[int]) -> None:
        """Has the section see the tokens that it does not know, up to its end."""
        section = self._section
        was_before = section.stage is Stage.BEFORE
        for token in tokens[len(self._known) - first :] if section.stage is not Stage.BEHIND else ():
            self._see(token)
            if section.stage is Stage.BEHIND:
                break
        if was_before and section.has_begun and self._grammar is not None:
            self._answer = self._grammar.new_output()

    def _see(self, token: int) -> None:
        self._section.feed(token)
        self._known.append(token)

    def _fill_known(self, words: Words, position: int) -> MaskOutcome:
        """The mask of a draw that was found to have one outcome before its turn came."""
        words[:] = 0
        add(words, self._known[position : position + 1])
        return MaskOutcome(MaskState.MASKED, forced=self._known[position:])

    def _look_ahead(self, position: int, stop_token_ids: frozenset[int]) -> None:
        """Goes on through what the section must end with, as `OutputPlace` does.

        The last token before an answer that has a grammar is left to be drawn: nothing may be able
        to follow it.
        """
        while len(self._known) - position < MAX_AHEAD:
            token = self._section.forced
            if token is None or token in stop_token_ids:
                return
            behind = self._section.copy()
            behind.feed(token)
            if behind.stage is Stage.BEHIND and self._grammar is not None:
                return
            self._see(token)

    def _answer_mask(
        self,
        words: Words,
        first: int,
        tokens: array[int],
        stop_token_ids: frozenset[int],
        min_tokens: int,
        looks_ahead: bool = False,
    ) -> MaskOutcome:
        assert self._answer is not None, "there is a grammar"
        begins = self._section.answer_begins
        own = tokens[max(begins - first, 0) :]
        return self._answer.fill_mask(
            words, max(first - begins, 0), own, stop_token_ids, min_tokens - begins, looks_ahead
        )


def _next_forced(section: ReasoningSection) -> int:
    return _NEVER if section.next_forced is None else section.next_forced
