"""Drafts and states: steps that verify drafts are the tokens one by one, whatever was right."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.kernel_case import DEVICES, DTYPES, ROUNDING, Numbers, kernels_on, poisoned_memory

from headrace_kernels.recurrence.delta_net import DeltaWeights, ProjectedTokens, delta_net, delta_net_reference
from headrace_kernels.recurrence.entries import RecurrentEntries
from headrace_kernels.recurrence.gated_delta import DeltaHeads
from headrace_kernels.recurrence.pending import RowStates, line_elements, longest_entry, states_of

KERNEL = 4
# Value heads that share a key, and sizes of no power of two.
HEADS = DeltaHeads(2, 4, 12, 20)


class Sequences:
    """Rows whose tokens are known from the start, computed in steps that guess some of them."""

    def __init__(
        self, num_rows: int, length: int, num_drafts: int, dtype: torch.dtype, device: str, heads: DeltaHeads = HEADS
    ) -> None:
        self.heads, self.num_drafts, self.num_rows, self.device = heads, num_drafts, num_rows, device
        self._numbers = numbers = Numbers(device, dtype)
        wide = Numbers(device, torch.float32, 3)
        width, count = heads.num_value_heads * heads.value_dim, heads.num_value_heads
        self._sizes = (heads.num_channels, width, count, count)
        self.tokens = numbers.randn(num_rows, length, sum(self._sizes))
        self.wrong = numbers.randn(num_rows, length, sum(self._sizes))
        self.weights = DeltaWeights(
            numbers.randn(heads.num_channels, KERNEL),
            wide.randn(count),
            wide.randn(count),
            numbers.randn(heads.value_dim),
            1e-6,
        )
        self.lines = torch.full(
            (num_rows + 2, line_elements(heads, KERNEL, num_drafts)), torch.nan, device=device, dtype=torch.float32
        )
        # Tokens of each row that are settled.
        self.ends = [0] * num_rows

    @property
    def states(self) -> RowStates:
        return states_of(self.lines, self.heads, KERNEL)

    def one_by_one(self) -> torch.Tensor:
        """Outputs of all tokens, computed without drafts, [num_rows, length, width]."""
        length = self.tokens.shape[1]
        plain = torch.full((self.num_rows, line_elements(self.heads, KERNEL, 0)), torch.nan, device=self.device)
        columns = (range(0, (self.num_rows + 1) * length, length), [length] * self.num_rows, range(self.num_rows))
        out = delta_net_reference(
            ProjectedTokens(*self.tokens.flatten(0, 1).split(self._sizes, dim=1)),
            self.weights,
            states_of(plain, self.heads, KERNEL),
            RecurrentEntries(*(torch.tensor(list(each), dtype=torch.int32, device=self.device) for each in columns)),
            self.heads,
        )
        return out.view(self.num_rows, length, -1)

    def step(
        self, entries: list[tuple[int, int, int, int]], reference: bool = False, pad: bool = True
    ) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
        """Computes (row, sure tokens, drafts, right drafts) each.

        Returns the outputs, and of each entry its row, first token, and those whose output counts.
        """
        parts, spans = [], []
        for row, sure, drafts, right in entries:
            start = self.ends[row]
            end = start + sure + right
            parts += [self.tokens[row, start:end], self.wrong[row, end : end + drafts - right]]
            spans.append((row, start, sure + right))
            self.ends[row] = end
        counts = [sure + drafts for _, sure, drafts, _ in entries] + [0] * pad
        seq_lens = [start + count for (_, start, _), count in zip(spans, counts, strict=False)] + [0] * pad
        rows = [row for row, *_ in entries] + [self.num_rows] * pad
        num_drafts = [drafts for _, _, drafts, _ in entries] + [0] * pad
        columns = ([0, *itertools.accumulate(counts)], seq_lens, rows)
        inputs = torch.cat((*parts, self.tokens[0, : 2 * pad]))
        compute = delta_net_reference if reference else delta_net
        out = compute(
            ProjectedTokens(*inputs.split(self._sizes, dim=1)),
            self.weights,
            self.states,
            RecurrentEntries(
                *(torch.tensor(each, dtype=torch.int32, device=self.device) for each in columns),
                max(counts) <= longest_entry(self.num_drafts),
                torch.tensor(num_drafts, dtype=torch.int32, device=self.device),
            ),
            self.heads,
        )
        return out, spans


def check(
    sequences: Sequences, steps: list[list[tuple[int, int, int, int]]], reference: bool, tolerance: float
) -> None:
    """Each step's outputs are those of the tokens one by one."""
    expected = sequences.one_by_one().float()
    for entries in steps:
        out, spans = sequences.step(entries, reference)
        first = 0
        for (row, start, counted), (_, sure, drafts, _) in zip(spans, entries, strict=True):
            torch.testing.assert_close(
                out[first : first + counted].float(),
                expected[row, start : start + counted],
                atol=tolerance,
                rtol=tolerance,
            )
            first += sure + drafts


# A prompt of some tokens, decodes whose drafts are right, wrong, partly right or none, what must
# come, short and long, while something is pending, and rows that begin in the middle.
STEPS = [
    [(0, 5, 0, 0), (1, 2, 0, 0)],
    [(0, 1, 3, 3), (1, 1, 3, 0)],
    [(0, 1, 3, 1), (1, 1, 0, 0), (2, 3, 0, 0)],
    [(1, 1, 2, 1), (0, 1, 0, 0), (2, 1, 3, 2)],
    [(0, 1, 3, 2), (1, 9, 0, 0), (2, 3, 0, 0)],
    [(2, 1, 3, 3), (0, 20, 0, 0), (1, 1, 1, 1)],
    [(0, 1, 3, 3), (1, 1, 3, 3), (2, 1, 3, 3)],
    [(0, 17, 0, 0), (2, 1, 1, 0), (1, 4, 0, 0)],
    [(0, 1, 3, 0), (1, 1, 3, 2), (2, 1, 0, 0)],
]


@pytest.mark.parametrize("num_drafts", [0, 1, 4, 8])
def test_a_line_says_how_many_drafts_it_is_for(num_drafts: int) -> None:
    lines = torch.zeros(3, line_elements(HEADS, KERNEL, num_drafts))
    states = states_of(lines, HEADS, KERNEL)
    assert (states.pending.num_drafts if states.pending is not None else 0) == num_drafts
    for number, view in enumerate((states.matrices, states.tails, *(states.pending or ()))):
        view[1:2].fill_(number + 1)
    # Views do not overlap, and nothing but padding is left.
    assert (lines[1] == 0).sum() < 4 and not lines[0].any() and not lines[2].any()


def test_the_reference_computes_what_tokens_one_by_one_do() -> None:
    check(Sequences(3, 60, 3, torch.float32, "cpu"), STEPS, reference=True, tolerance=1e-4)


@hypothesis.settings(max_examples=examples(40, least=5), deadline=None)
@hypothesis.given(data=st.data(), num_drafts=st.sampled_from([1, 3, 4, 8]))
def test_any_order_of_steps_is_tokens_one_by_one(data: st.DataObject, num_drafts: int) -> None:
    sequences, steps, left = Sequences(2, 60, num_drafts, torch.float32, "cpu"), [], [60, 60]
    for _ in range(data.draw(st.integers(1, 12))):
        entries = []
        for row in data.draw(st.sampled_from([[0], [1], [0, 1], [1, 0]])):
            drafts = data.draw(st.integers(0, num_drafts))
            sure = 1 if drafts else data.draw(st.sampled_from([1, 1, 2, 5, 17]))
            right = data.draw(st.integers(0, drafts))
            if sure + drafts <= left[row]:
                left[row] -= sure + right
                entries.append((row, sure, drafts, right))
        if entries:
            steps.append(entries)
    check(sequences, steps, reference=False, tolerance=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_compute_what_tokens_one_by_one_do(device: str) -> None:
    sequences = Sequences(3, 60, 3, torch.float32, device)
    with kernels_on(device), poisoned_memory(device):
        check(sequences, STEPS, reference=False, tolerance=2e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_leave_states_as_the_reference_does(device: str) -> None:
    found, wanted = (Sequences(3, 60, 3, torch.float32, device) for _ in range(2))
    for entries in STEPS[:5]:
        with kernels_on(device), poisoned_memory(device):
            found.step(entries)
        wanted.step(entries, reference=True)
        torch.testing.assert_close(found.states.tails, wanted.states.tails, atol=0, rtol=0, equal_nan=True)
        (mixed, gates, bases), (of_wanted, gates_wanted, bases_wanted) = found.states.pending, wanted.states.pending
        # Sums of a convolution in another order.
        torch.testing.assert_close(mixed, of_wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
        torch.testing.assert_close(gates, gates_wanted, atol=0, rtol=0, equal_nan=True)
        matrices, expected = (each.states.matrices[:3] for each in (found, wanted))
        torch.testing.assert_close(matrices, expected, atol=1e-4, rtol=1e-4, equal_nan=True)
        begun = [row for row in range(3) if found.ends[row]]
        assert torch.equal(bases[begun], bases_wanted[begun])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_drafts", [4, 8])
def test_heads_of_models_compute_what_tokens_one_by_one_do(dtype: torch.dtype, num_drafts: int) -> None:
    sequences = Sequences(8, 200, num_drafts, dtype, "cuda", DeltaHeads(16, 32, 128, 128))
    steps = [[(row, 20 + row, 0, 0) for row in range(8)]]
    for step in range(8):
        steps.append(
            [
                (row, 1, (row + step) % (num_drafts + 1), (row * step) % ((row + step) % (num_drafts + 1) + 1))
                for row in range(8)
            ]
        )
    steps.append([(0, 1, 2, 1), (1, 9, 0, 0), (2, 40, 0, 0), (3, 16, 0, 0), (4, 17, 0, 0)])
    steps.append([(row, 1, 3, 1) for row in range(8)])
    # Outputs are rounded, normed, rounded, gated and rounded, and so are the inputs of the rule.
    check(sequences, steps, reference=False, tolerance=2e-3 + 12 * ROUNDING[dtype])
