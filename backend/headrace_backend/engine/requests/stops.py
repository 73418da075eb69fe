"""Stop strings on a stream of tokens, on bytes, across token borders.

Owns the automaton (Aho-Corasick over the request's strings, shared by its outputs) and, per output,
how far a possible match reaches back, so that the tokens it covers are held back. Does not know
tokens' text: the engine feeds each token's bytes. The result never depends on where the borders of
tokens fall: the first byte at which any string is complete ends the text; of several strings that
end there, the longest counts. A token that can't begin a match costs one look at its bytes, others
a dictionary look-up per byte, and only outputs that have strings pay.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A string was completed within the token fed last."""

    string_index: int
    # Bytes to cut from the end of the output, the token fed last included.
    trim_bytes: int


class StopAutomaton:
    """An Aho-Corasick automaton over bytes.

    State 0 is the root; a state's depth is the length of the prefix that it stands for.
    """

    __slots__ = ("depths", "fallbacks", "first_bytes", "matches", "strings", "transitions")

    def __init__(self, strings: tuple[bytes, ...]) -> None:
        """Builds the automaton of at least one non-empty string."""
        assert strings and all(strings), "validated before"
        self.strings = strings
        self.transitions: list[dict[int, int]] = [{}]
        self.depths = [0]
        # Longest proper suffix that is a prefix of some string.
        self.fallbacks = [0]
        # Index of the longest string that ends in the state; -1: none.
        self.matches = [-1]
        for index, string in enumerate(strings):
            self._insert(index, string)
        self._link()
        # A token without any of these leaves the root where it is.
        self.first_bytes = frozenset(self.transitions[0])

    def advance(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        transitions = self.transitions
        while True:
            following = transitions[state].get(byte)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fallbacks[state]

    def _insert(self, index: int, string: bytes) -> None:
        state = 0
        for byte in string:
            following = self.transitions[state].get(byte)
            if following is None:
                following = len(self.transitions)
                self.transitions[state][byte] = following
                self.transitions.append({})
                self.depths.append(self.depths[state] + 1)
                self.fallbacks.append(0)
                self.matches.append(-1)
            state = following
        if self.matches[state] < 0:
            self.matches[state] = index

    def _link(self) -> None:
        """Links each state to its fallback, breadth first.

        A fallback is shallower than its state, so it is complete when it is needed.
        """
        queue = deque(self.transitions[0].values())
        while queue:
            state = queue.popleft()
            for byte, child in self.transitions[state].items():
                self.fallbacks[child] = self.advance(self.fallbacks[state], byte)
                queue.append(child)
            if self.matches[state] < 0:
                self.matches[state] = self.matches[self.fallbacks[state]]


class StopWatch:
    """One output's progress through the automaton, and the tokens that it holds back."""

    __slots__ = ("_automaton", "_held_bytes", "_held_lengths", "_include", "_state")

    def __init__(self, automaton: StopAutomaton, include_stop_string: bool) -> None:
        """Nothing fed yet."""
        self._automaton = automaton
        self._include = include_stop_string
        self._state = 0
        # Byte lengths of the tokens held back, oldest first.
        self._held_lengths: deque[int] = deque()
        self._held_bytes = 0

    def copy(self) -> StopWatch:
        """Another output's progress that begins where this one is."""
        other = StopWatch(self._automaton, self._include)
        other._state, other._held_bytes = self._state, self._held_bytes
        other._held_lengths = self._held_lengths.copy()
        return other

    @property
    def num_held(self) -> int:
        """Tokens, the newest ones, that a match could still reach into."""
        return len(self._held_lengths)

    def feed(self, token: bytes, may_stop: bool) -> StopMatch | None:
        """Takes the next token's bytes.

        Args:
            token: The bytes, possibly none.
            may_stop: Whether a match that ends in this token counts (min_tokens is reached).

        Returns:
            The first match, after which the watch is not fed again; None if the output goes on.
        """
        automaton = self._automaton
        state = self._state
        if state == 0 and automaton.first_bytes.isdisjoint(token):
            return None
        for position, byte in enumerate(token):
            state = automaton.advance(state, byte)
            index = automaton.matches[state]
            if index >= 0 and may_stop:
                following = len(token) - position - 1
                return StopMatch(index, following + (0 if self._include else len(automaton.strings[index])))
        self._state = state
        self._hold(len(token), automaton.depths[state])
        return None

    def _hold(self, length: int, reach: int) -> None:
        """Adds a token, then lets go of the oldest ones that end before the last `reach` bytes."""
        held = self._held_lengths
        held.append(length)
        self._held_bytes += length
        while held and self._held_bytes - held[0] >= reach:
            self._held_bytes -= held.popleft()
