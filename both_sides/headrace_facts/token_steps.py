"""Which step sampled each token of an output, as runs: an output that decodes samples one token in
each step, so only the tokens are told from which on that is so anew.

Owns the form, both ways. Tokens before the first run were sampled by no step of this engine: an
earlier attempt emitted them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

# Of one output: what is told of more is nonsense, and would take gigabytes.
MOST_TOKENS: Final = 1 << 20


class TokenSteps(msgspec.Struct, frozen=True, array_like=True):
    """The steps of one output's tokens."""

    num_tokens: int
    # (index of a token, id of the step that sampled it), uint64 each, by index; the tokens after it
    # come from the steps after that, one each, until the next run.
    runs: bytes


def of_runs(runs: Iterable[tuple[int, int]], num_tokens: int) -> TokenSteps:
    """Packs (index of a token, step) by index; what begins behind the last token is left out."""
    flat: array[int] = array("Q")
    for run in runs:
        if run[0] < num_tokens:
            flat.extend(run)
    return TokenSteps(num_tokens, flat.tobytes())


def step_ids(steps: TokenSteps) -> npt.NDArray[np.uint64]:
    """The step of each token, [num_tokens]; 0: an earlier attempt's.

    Raises:
        ValueError: Runs that are none, not in order or behind the last token, or more tokens than
            an output has.
    """
    num_tokens = steps.num_tokens
    if not 0 <= num_tokens <= MOST_TOKENS:
        raise ValueError(f"{num_tokens} tokens of one output")
    runs = np.frombuffer(steps.runs, "<u8").reshape(-1, 2)
    ids = np.arange(num_tokens, dtype=np.uint64)
    if len(runs) == 1 and not runs[0, 0] and num_tokens:
        ids += runs[0, 1]
        return ids
    return _joined(runs, ids)


def _joined(runs: npt.NDArray[np.uint64], ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """As `step_ids`, of any number of runs; `ids` count from 0."""
    firsts = runs[:, 0]
    if len(runs) and (int(firsts[-1]) >= len(ids) or (firsts[1:] < firsts[:-1]).any()):
        raise ValueError("runs of steps do not fit their tokens")
    ends = np.append(firsts[1:], np.uint64(len(ids)))[: len(firsts)]
    lengths = (ends - firsts).astype(np.int64)
    begin = len(ids) - int(lengths.sum())
    ids[:begin] = 0
    ids[begin:] += np.repeat(runs[:, 1] - firsts, lengths)
    return ids
