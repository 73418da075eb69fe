"""Stop strings are found wherever tokens are cut, and held back as far as they could reach."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_backend.engine.requests.stops import StopAutomaton, StopWatch


def first_end(text: bytes, strings: tuple[bytes, ...]) -> tuple[int, int] | None:
    """Finds the end of the first stop string that is complete, by looking at every prefix.

    It also returns the longest string that ends there.
    """
    for end in range(1, len(text) + 1):
        ending = [index for index, string in enumerate(strings) if text[:end].endswith(string)]
        if ending:
            return end, max(ending, key=lambda index: len(strings[index]))
    return None


def cut(text: bytes, borders: list[int]) -> list[bytes]:
    """The text in tokens, some of them empty."""
    positions = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    return [text[a:b] for a, b in zip(positions, positions[1:], strict=False)]


texts = st.lists(st.sampled_from(b"ab\xc3\xa9"), max_size=40).map(bytes)
strings = st.lists(st.lists(st.sampled_from(b"ab\xc3"), min_size=1, max_size=5).map(bytes), min_size=1, max_size=4)


@given(texts, strings.map(tuple), st.lists(st.integers(0, 40), max_size=20), st.booleans())
def test_match_and_kept_text_do_not_depend_on_token_borders(
    text: bytes, stop_strings: tuple[bytes, ...], borders: list[int], include: bool
) -> None:
    watch = StopWatch(StopAutomaton(stop_strings), include)
    expected = first_end(text, stop_strings)
    fed = b""
    for token in cut(text, borders):
        fed += token
        match = watch.feed(token, may_stop=True)
        if match is not None:
            assert expected is not None
            end, index = expected
            assert len(stop_strings[match.string_index]) == len(stop_strings[index])
            kept = end if include else end - len(stop_strings[index])
            assert fed[: len(fed) - match.trim_bytes] == text[:kept]
            return
    assert expected is None


@given(texts, strings.map(tuple), st.lists(st.integers(0, 40), max_size=20))
def test_released_tokens_are_never_part_of_a_later_match_and_no_more_are_held(
    text: bytes, stop_strings: tuple[bytes, ...], borders: list[int]
) -> None:
    watch = StopWatch(StopAutomaton(stop_strings), include_stop_string=False)
    tokens: list[bytes] = []
    for token in cut(text, borders):
        tokens.append(token)
        if watch.feed(token, may_stop=True) is not None:
            return
        fed = b"".join(tokens)
        reach = max(n for s in stop_strings for n in range(len(s)) if fed.endswith(s[:n]))
        held = b"".join(tokens[len(tokens) - watch.num_held :])
        assert len(held) >= reach
        if watch.num_held:
            assert len(held) - len(tokens[len(tokens) - watch.num_held]) < reach


def test_match_before_it_may_stop_is_passed_over() -> None:
    watch = StopWatch(StopAutomaton((b"ab",)), include_stop_string=False)
    assert watch.feed(b"ab", may_stop=False) is None
    assert watch.feed(b"xa", may_stop=False) is None
    match = watch.feed(b"bcd", may_stop=True)
    assert match is not None and match.trim_bytes == 4


def test_match_that_ends_in_the_first_token_that_may_stop_counts() -> None:
    watch = StopWatch(StopAutomaton((b"abc",)), include_stop_string=True)
    assert watch.feed(b"ab", may_stop=False) is None
    match = watch.feed(b"cd", may_stop=True)
    assert match == (0, 1)
