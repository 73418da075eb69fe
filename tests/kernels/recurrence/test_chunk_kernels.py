"""The gated delta rule by chunks in Triton: as the rule in fp64, however long entries are."""

from __future__ import annotations

import pytest
import torch
from tests.support.kernel_case import DEVICES, DTYPES, kernels_on, poisoned_memory
from tests.support.recurrent_case import RecurrentCase, rule_in_fp64

from headrace_kernels.recurrence import gated_delta as rule
from headrace_kernels.recurrence.chunk_kernels import LEAST_TOKENS, ChunkTile, launch_chunks
from headrace_kernels.recurrence.gated_delta import LENGTH_EPS, DeltaGates, DeltaHeads, gated_delta

HEADS = DeltaHeads(1, 2, 16, 16)
# On a card chunks are of 16-bit types; the interpreter computes them exactly.
TYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
# What a result may be off by, relative to the largest: products of numbers that are rounded to the
# type, two of them one after the other, through states that remember; fp32 in the interpreter.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}


def check(
    case: RecurrentCase, mixed: torch.Tensor, gates: DeltaGates, heads: DeltaHeads, device: str, added: float = 0.0
) -> None:
    states = case.states(*heads[1:])
    expected, wanted = rule_in_fp64(case, mixed, gates, states, heads)
    with kernels_on(device), poisoned_memory(device):
        found = gated_delta(mixed, gates, states, case.entries, heads)
    # In the interpreter only the output is rounded.
    tolerance = TOLERANCE[mixed.dtype if device == "cuda" else torch.float32] + added
    rounding = torch.finfo(mixed.dtype).eps
    error = (found[: case.num_filled].double() - expected).abs()
    assert (error <= tolerance * expected.abs().max() + rounding * expected.abs()).all(), error.max()
    rows = [row for row, count in zip(case.rows, case.counts, strict=True) if count]
    torch.testing.assert_close(
        states[rows].double(), wanted[rows], rtol=0, atol=tolerance * float(wanted[rows].abs().max())
    )
    others = sorted(set(range(case.num_rows)) - set(rows))
    assert states[others].isnan().all(), "a row that computes nothing keeps its state"


@pytest.mark.parametrize(
    ("counts", "starts"),
    [
        # Around the ends of chunks and the shortest entry with any, decodes and padding between.
        ([1, 64, 0, 65, 1], [4, 0, 0, 3, 0]),
        ([200, LEAST_TOKENS - 1, LEAST_TOKENS, 63], [7, 2, 0, 1]),
        # More entries than may be long: a program looks for the one that begins in its window.
        ([1, 1, 0, 2, 40, 1, 0, 1, 0], [4, 1, 0, 3, 5, 0, 0, 9, 0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
def test_entries_of_any_length_agree_with_the_rule(counts: list[int], starts: list[int], device: str) -> None:
    case = RecurrentCase(counts, starts, TYPES[device], device)
    check(case, case.mixed(HEADS), case.gates(HEADS), HEADS, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", ["nothing remembered", "nothing forgotten", "all at once"])
def test_extreme_gates_and_equal_keys_agree_with_the_rule(size: str, device: str) -> None:
    """Decays that underflow, none at all, and a token that repeats."""
    case = RecurrentCase([130], [3], TYPES[device], device)
    mixed, gates = case.mixed(HEADS), case.gates(HEADS)
    mixed[10:120] = mixed[10]
    if size == "all at once":
        decay = 40.0 * gates.decay
    else:
        decay = torch.full_like(gates.decay, 1e4 if size == "nothing remembered" else -1e4)
    gates = gates._replace(decay=decay, correction=10.0 + 0.0 * gates.correction)
    # Logarithms of decays add up to thousands within a chunk, so their differences lose digits. Of
    # equal keys each correction removes what the rounding of the last one left.
    check(case, mixed, gates, HEADS, device, 2e-4 if device == "cpu" else 5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [DeltaHeads(2, 4, 12, 20), DeltaHeads(1, 3, 40, 70)])
def test_sizes_of_no_power_of_two_agree_with_the_rule(heads: DeltaHeads, dtype: torch.dtype, device: str) -> None:
    case = RecurrentCase([70, 1, 129, 17], [0, 3, 5, 1], dtype, device)
    check(case, case.mixed(heads), case.gates(heads), heads, device)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 32])
def test_shorter_chunks_agree_with_the_rule(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*operands: object, **options: int) -> None:
        launch_chunks(*operands, tile=ChunkTile(chunk=chunk, columns=16), **options)

    monkeypatch.setattr(rule, "launch_chunks", launched)
    case = RecurrentCase([70, 16, 33, 1], [0, 3, 5, 1], torch.float32, "cpu")
    check(case, case.mixed(HEADS), case.gates(HEADS), HEADS, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_keys_of_zeros_are_harmless(device: str) -> None:
    case = RecurrentCase([80], [0], torch.float16 if device == "cuda" else torch.float32, device)
    mixed = case.mixed(HEADS)
    mixed[:, : 2 * HEADS.num_key_heads * HEADS.key_dim] = 0
    check(case, 100 * mixed, case.gates(HEADS), HEADS, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_models_agree_with_the_rule(dtype: torch.dtype) -> None:
    heads = DeltaHeads(16, 32, 128, 128)
    for counts, starts in (([700, 1, 129, 64, 0], [0, 9, 4096, 64, 0]), ([2048], [100])):
        case = RecurrentCase(counts, starts, dtype, "cuda")
        check(case, case.mixed(heads), case.gates(heads), heads, "cuda")


def test_the_length_of_keys_has_the_rules_addend() -> None:
    assert LENGTH_EPS == 1e-6, "as transformers' l2norm has it"
