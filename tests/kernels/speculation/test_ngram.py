"""Lookup of a row's last tokens in what it has: the reference by its words, and the kernels."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, kernels_on

from headrace_kernels.speculation.ngram import MAX_RUN, MIN_RUN, append_tokens, propose_ngram

NUM_DRAFTS = 4


def expected(tokens: list[int]) -> list[int]:
    """What the words say, place by place."""
    best = (0, -1)
    for place in range(len(tokens) - 1):
        run = 0
        while run < MAX_RUN and run <= place and tokens[place - run] == tokens[len(tokens) - 1 - run]:
            run += 1
        if run >= MIN_RUN:
            best = max(best, (run, place))
    if best[1] < 0:
        return tokens[-1:] * NUM_DRAFTS
    text = list(tokens)
    for source in range(best[1] + 1, best[1] + 1 + NUM_DRAFTS):
        text.append(text[source])
    return text[-NUM_DRAFTS:]


def proposed(rows: list[list[int]], device: str, num_places: int = 40) -> list[list[int]]:
    history = torch.full((len(rows) + 1, num_places), 1, dtype=torch.int32, device=device)
    for index, tokens in enumerate(rows):
        history[len(rows) - index, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=device)
    places = torch.tensor([-7, *range(len(rows), 0, -1)], dtype=torch.int32, device=device)[1:]
    lengths = torch.tensor([len(tokens) for tokens in rows], device=device)
    found: list[list[int]] = propose_ngram(history, places, lengths, NUM_DRAFTS).tolist()
    return found


texts = strategies.lists(strategies.lists(strategies.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4)


@hypothesis.settings(max_examples=examples(150), deadline=None)
@hypothesis.given(texts)
def test_the_reference_continues_the_longest_run(rows: list[list[int]]) -> None:
    assert proposed(rows, "cpu") == [expected(tokens) for tokens in rows]


@hypothesis.settings(max_examples=examples(20), deadline=None)
@hypothesis.given(texts)
def test_the_kernels_continue_the_longest_run(rows: list[list[int]]) -> None:
    with kernels_on("cpu"):
        assert proposed(rows, "cpu") == [expected(tokens) for tokens in rows]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_longer_than_a_pass_of_all_programs(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50_000, (20_000,), generator=generator).tolist()
    tokens[-MAX_RUN:] = tokens[17_000 : 17_000 + MAX_RUN]
    with kernels_on(device):
        assert proposed([tokens], device, 20_011) == [tokens[17_000 + MAX_RUN : 17_000 + MAX_RUN + NUM_DRAFTS]]


@pytest.mark.parametrize("device", [*DEVICES, "reference"])
def test_tokens_are_appended_as_far_as_there_is_room(device: str) -> None:
    place = "cpu" if device == "reference" else device
    history = torch.zeros(3, 5, dtype=torch.int32, device=place)
    rows = torch.tensor([-7, 2, 0], dtype=torch.int32, device=place)[1:]
    arguments = rows, torch.tensor([1, 4], device=place), torch.tensor([[7, 8, 9], [4, 5, 6]], device=place)
    if device == "reference":
        append_tokens(history, *arguments)
    else:
        with kernels_on(device):
            append_tokens(history, *arguments)
    assert history.tolist() == [[0, 0, 0, 0, 4], [0] * 5, [0, 7, 8, 9, 0]]
