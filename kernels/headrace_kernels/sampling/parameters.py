"""How the sampling parameters of all rows lie in one matrix, int32 [num_rows + 1, 16].

Owns the meaning of its columns and how tensors are read out of it. One matrix, because a kernel
then reads whatever it needs of a row from one cache line, and because the worker brings it up to
date with one copy. Floats are stored as their bits. A row of zeros is a greedy row without
penalties' strengths; the last row stays so, for the padding of captured graphs. The worker writes
the matrix (`row_parameters`); `sampling`, `penalties` and their kernels read it.
"""

from __future__ import annotations

from typing import Final

import torch

from headrace_kernels.sampling.philox import NoiseKeys

# float32; 0: the most likely token.
TEMPERATURE = 0
# float32; 1 keeps all.
TOP_P = 1
# float32; 0 keeps all.
MIN_P = 2
# Tokens kept; 0 all.
TOP_K = 3
# The seed's 64 bits, in the order in which an int64 has them in memory.
SEED_LOW = 4
SEED_HIGH = 5
# Which output of its request the row is.
OUTPUT_INDEX = 6
# float32, strengths of penalties.
REPETITION = 7
PRESENCE = 8
FREQUENCY = 9
# float32; standard deviations below the highest logit that are kept, 0 all.
TOP_N_SIGMA = 10
NUM_COLUMNS = 16

# Columns that hold a float of a request's sampling parameters as it is, by the parameter's name.
FLOATS: Final = {
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "min_p": MIN_P,
    "repetition_penalty": REPETITION,
    "presence_penalty": PRESENCE,
    "frequency_penalty": FREQUENCY,
    "top_n_sigma": TOP_N_SIGMA,
}


def read_floats(rows: torch.Tensor, column: int) -> torch.Tensor:
    """A float column: float32 [num_samples] from rows of the matrix, int32 [num_samples, 16]."""
    return rows[:, column].view(torch.float32)


def read_noise_keys(rows: torch.Tensor, output_positions: torch.Tensor) -> NoiseKeys:
    """Keys of the noise of the matrix's rows at positions of their outputs, int [num_samples]."""
    seeds = rows.view(torch.int64)[:, SEED_LOW // 2]
    return NoiseKeys(seeds, rows[:, OUTPUT_INDEX].to(torch.int64), output_positions.to(torch.int64))
