"""Lookup in a row's tokens and in earlier answers: reference and kernels, by its words."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.examples import examples
from tests.support.kernel_case import kernels_on

from headrace_kernels.speculation.suffix import MAX_SUFFIX, MIN_SUFFIX, SEPARATOR, propose_suffix, remember

NUM_DRAFTS = 4
MEMORY = 12

texts = strategies.lists(strategies.integers(0, 2), min_size=1, max_size=24)


def longest(text: list[int], suffix: list[int]) -> tuple[int, int]:
    """Length and last place of the longest run of `suffix`'s end, the latest of the longest."""
    best = (0, -1)
    for place in range(len(text)):
        run = 0
        while run < min(MAX_SUFFIX, len(suffix)) and run <= place and text[place - run] == suffix[-1 - run]:
            run += 1
        best = max(best, (run, place))
    return best


def expected(tokens: list[int], memory: list[int]) -> list[int]:
    """What the words say, place by place."""
    own, remembered = longest(tokens[:-1], tokens), longest(memory, tokens)
    if max(own[0], remembered[0]) < MIN_SUFFIX:
        return tokens[-1:] * NUM_DRAFTS
    if own[0] >= remembered[0]:
        text = list(tokens)
        for source in range(own[1] + 1, own[1] + 1 + NUM_DRAFTS):
            text.append(text[source])
        return text[-NUM_DRAFTS:]
    line = [memory[(remembered[1] + 1 + step) % len(memory)] for step in range(NUM_DRAFTS)]
    end = line.index(SEPARATOR) if SEPARATOR in line else NUM_DRAFTS
    return line[:end] + tokens[-1:] * (NUM_DRAFTS - end)


def proposed(rows: list[list[int]], memories: list[list[int]], slots: list[int]) -> list[list[int]]:
    history = torch.full((len(rows), 30), 1, dtype=torch.int32)
    for line, tokens in zip(history, rows, strict=True):
        line[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    found = propose_suffix(
        history,
        torch.arange(len(rows), dtype=torch.int32),
        torch.tensor([len(tokens) for tokens in rows]),
        torch.tensor(memories, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
        NUM_DRAFTS,
    )
    drafts: list[list[int]] = found.tolist()
    return drafts


remembered = strategies.lists(strategies.integers(SEPARATOR, 2), min_size=MEMORY, max_size=MEMORY)
cases = strategies.tuples(
    strategies.lists(strategies.tuples(texts, strategies.integers(0, 1)), min_size=1, max_size=3),
    strategies.tuples(remembered, remembered),
)


def check_proposals(case: tuple[list[tuple[list[int], int]], tuple[list[int], list[int]]]) -> None:
    rows, memories = case
    wanted = [expected(tokens, memories[slot]) for tokens, slot in rows]
    assert proposed([tokens for tokens, _ in rows], list(memories), [slot for _, slot in rows]) == wanted


@hypothesis.settings(max_examples=examples(150), deadline=None)
@hypothesis.given(cases)
def test_the_reference_continues_the_longest_run_of_row_and_memory(
    case: tuple[list[tuple[list[int], int]], tuple[list[int], list[int]]],
) -> None:
    check_proposals(case)


@hypothesis.settings(max_examples=examples(20), deadline=None)
@hypothesis.given(cases)
def test_the_kernels_continue_the_longest_run_of_row_and_memory(
    case: tuple[list[tuple[list[int], int]], tuple[list[int], list[int]]],
) -> None:
    with kernels_on("cpu"):
        check_proposals(case)


answers = strategies.lists(strategies.tuples(strategies.integers(0, 1), texts), min_size=1, max_size=6)


def check_memory(given: list[tuple[int, list[int]]]) -> None:
    memory = torch.full((2, MEMORY), SEPARATOR, dtype=torch.int32)
    ends = torch.zeros(2, dtype=torch.int64)
    history = torch.zeros(len(given), 30, dtype=torch.int32)
    for line, (_, tokens) in zip(history, given, strict=True):
        line[2 : 2 + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    lengths = torch.tensor([2 + len(tokens) for _, tokens in given])
    slots = torch.tensor([slot for slot, _ in given], dtype=torch.int32)
    rows = torch.arange(len(given), dtype=torch.int32)
    remember(memory, ends, slots, history, rows, torch.full((len(given),), 2), lengths)
    for slot in range(2):
        kept = [[*tokens[-(MEMORY - 1) :], SEPARATOR] for place, tokens in given if place == slot]
        line = [token for tokens in kept for token in tokens]
        assert ends[slot] == len(line)
        ring = [SEPARATOR] * MEMORY
        for place, token in enumerate(line):
            ring[place % MEMORY] = token
        assert memory[slot].tolist() == ring


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_answers_lie_side_by_side_over_the_oldest(kernels: bool) -> None:
    @hypothesis.settings(max_examples=examples(20), deadline=None)
    @hypothesis.given(answers)
    def check(given: list[tuple[int, list[int]]]) -> None:
        if kernels:
            with kernels_on("cpu"):
                check_memory(given)
        else:
            check_memory(given)

    check()


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_an_empty_answer_leaves_nothing(kernels: bool) -> None:
    memory = torch.full((1, MEMORY), SEPARATOR, dtype=torch.int32)
    ends = torch.zeros(1, dtype=torch.int64)
    nothing = torch.zeros(1, dtype=torch.int32)
    arguments = (memory, ends, nothing, torch.ones(1, 8, dtype=torch.int32), nothing, torch.tensor([3]))
    if kernels:
        with kernels_on("cpu"):
            remember(*arguments, torch.tensor([3]))
    else:
        remember(*arguments, torch.tensor([3]))
    assert memory.eq(SEPARATOR).all() and ends.tolist() == [0]
