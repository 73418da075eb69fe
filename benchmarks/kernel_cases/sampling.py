"""Cases of the draw, log probabilities and penalties.

They are whole batches in which all rows ask for one kind, and one batch of every kind.

Owns the data: Gaussian logits of two spreads. At 1 they are flat, so that top-p 0.9 keeps half of
the vocabulary; at 6 as peaked as a model's. What counts as bytes is one reading of the logits. A
truncated draw takes several passes over those of its row; how many depends on the draw, so a figure
is a mean over fresh rows. The rivals sort (`_torch`), as a sampler without kernels of its own does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from headrace_kernels.sampling import parameters as columns
from headrace_kernels.sampling.choice import sample_rows
from headrace_kernels.sampling.logprobs import token_logprobs
from headrace_kernels.sampling.penalties import penalize_rows

VOCAB = 128_256
Case = tuple[Callable[[], object], int, int]

KINDS: dict[str, dict[int, float]] = {
    "greedy": {},
    "random": {columns.TEMPERATURE: 1.0},
    "top_p": {columns.TEMPERATURE: 1.0, columns.TOP_P: 0.9},
    "top_k": {columns.TEMPERATURE: 1.0, columns.TOP_K: 50},
    "top_k_top_p": {columns.TEMPERATURE: 0.7, columns.TOP_K: 20, columns.TOP_P: 0.8},
    "large_top_k_top_p": {columns.TEMPERATURE: 1.0, columns.TOP_K: 2000, columns.TOP_P: 0.95},
    "min_p": {columns.TEMPERATURE: 1.0, columns.MIN_P: 0.05},
    "top_n_sigma": {columns.TEMPERATURE: 1.0, columns.TOP_N_SIGMA: 1.0},
}


def _matrix(kinds: list[dict[int, float]]) -> Tensor:
    matrix = np.zeros((len(kinds) + 1, columns.NUM_COLUMNS), np.int32)
    matrix.view(np.float32)[:, columns.TOP_P] = 1
    for row, kind in enumerate(kinds):
        for column, value in kind.items():
            matrix.view(np.int32 if column == columns.TOP_K else np.float32)[row, column] = value
    matrix[:, columns.SEED_LOW] = torch.randint(0, 2**31 - 1, (len(kinds) + 1,)).numpy()
    return torch.from_numpy(matrix).cuda()


def _logits(num_rows: int, dtype: torch.dtype, spread: float) -> Tensor:
    return (torch.randn(num_rows, VOCAB, device="cuda") * spread).to(dtype)


def _draw(kinds: list[dict[int, float]], dtype: torch.dtype, spread: float) -> Case:
    logits, matrix = _logits(len(kinds), dtype, spread), _matrix(kinds)
    rows = torch.arange(len(kinds), dtype=torch.int32, device="cuda")
    return functools.partial(sample_rows, logits, rows, rows, matrix), logits.nbytes, 0


def draws() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Rows of one kind, flat and peaked; rows of all kinds."""
    for num_rows in (1, 32, 256):
        for name, kind in KINDS.items():
            for spread in (1.0, 6.0):
                label = f"{name} {num_rows} bf16 spread {spread:.0f}"
                yield label, functools.partial(_draw, [kind] * num_rows, torch.bfloat16, spread)
    mixture = [kind for _, kind in zip(range(256), [*KINDS.values()] * 37, strict=False)]
    yield "mixture 256 bf16 spread 6", functools.partial(_draw, mixture, torch.bfloat16, 6.0)
    for name in ("greedy", "top_p"):
        for num_rows in (1, 256):
            yield (
                f"{name} {num_rows} fp32 spread 6",
                functools.partial(_draw, [KINDS[name]] * num_rows, torch.float32, 6.0),
            )


def _argmax_torch(num_rows: int) -> Case:
    logits = _logits(num_rows, torch.bfloat16, 6.0)
    return lambda: logits.argmax(dim=1), logits.nbytes, 0


def _top_p_torch(num_rows: int) -> Case:
    logits = _logits(num_rows, torch.bfloat16, 6.0)

    def draw() -> Tensor:
        values, ids = logits.float().sort(dim=1, descending=True)
        probabilities = values.softmax(dim=1)
        kept = probabilities.masked_fill(probabilities.cumsum(dim=1) - probabilities >= 0.9, 0)
        best = (kept / torch.empty_like(kept).exponential_()).argmax(dim=1, keepdim=True)
        return ids.gather(1, best)

    return draw, logits.nbytes, 0


def rivals() -> Iterator[tuple[str, Callable[[], Case]]]:
    """What torch takes for an argmax, and for top-p by sorting."""
    for num_rows in (1, 256):
        yield f"greedy {num_rows} bf16_torch", functools.partial(_argmax_torch, num_rows)
        yield f"top_p {num_rows} bf16_torch", functools.partial(_top_p_torch, num_rows)


def _report(num_rows: int, num_top: int) -> Case:
    logits = _logits(num_rows, torch.float32, 6.0)
    tokens = logits.argmax(dim=1)
    return functools.partial(token_logprobs, logits, tokens, num_top), logits.nbytes, 0


def logprobs() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Log probabilities of the sampled tokens and of the first few, or many."""
    for num_rows in (1, 256):
        for num_top in (0, 5, 20, 200):
            yield f"{num_rows} rows, {num_top} top", functools.partial(_report, num_rows, num_top)


def _penalize(num_rows: int) -> Case:
    logits = _logits(num_rows, torch.float32, 6.0)
    masks = torch.rand(num_rows, VOCAB, device="cuda") < 0.01
    counts = masks.to(torch.int32)
    strengths = {columns.REPETITION: 1.1, columns.PRESENCE: 0.2, columns.FREQUENCY: 0.1}
    matrix = _matrix([strengths] * num_rows)
    rows = torch.arange(num_rows, device="cuda")
    moved = 2 * logits.nbytes + masks.nbytes + counts.nbytes
    return functools.partial(penalize_rows, logits, rows, rows, rows, masks, counts, matrix), moved, 0


def penalties() -> Iterator[tuple[str, Callable[[], Case]]]:
    """All rows of a batch penalized."""
    for num_rows in (1, 256):
        yield f"{num_rows} rows", functools.partial(_penalize, num_rows)
