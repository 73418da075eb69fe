"""Compiles sampling, penalties, masks and log probabilities for a card that is not here.

The kernels are compiled as their launchers would.

    python -m tests.support.compiled_sampling 90 TYPE_OF_LOGITS...

prints one line of JSON per kernel that is different, after batches of many sizes whose columns lie
at many addresses.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from tests.support.compiled_kernels import compiling_for, resources

from headrace_kernels.sampling import parameters as sampling_parameters
from headrace_kernels.sampling.choice_triton import sample_rows_triton
from headrace_kernels.sampling.logprobs_triton import token_logprobs_triton
from headrace_kernels.sampling.penalties_triton import penalize_rows_triton
from headrace_kernels.sampling.token_masks import num_words
from headrace_kernels.sampling.token_masks_triton import mask_rows_triton

VOCAB = 128_256


def launch_all(dtype: torch.dtype) -> None:
    """Launches plain draws, log probabilities, penalties and masks of some batches.

    Columns start anywhere in a larger one.
    """
    matrix = torch.zeros(257, sampling_parameters.NUM_COLUMNS, dtype=torch.int32)
    columns = torch.zeros(2000, dtype=torch.int32)
    wide = torch.zeros(2000, dtype=torch.int64)
    for num_rows, first in ((1, 0), (2, 1), (16, 4), (17, 3)):
        logits = torch.empty(num_rows, VOCAB, dtype=dtype)
        rows, positions = columns[first : first + num_rows], columns[first + 500 : first + 500 + num_rows]
        sample_rows_triton(logits, rows, positions, matrix)
        for num_top in (0, 1, 16, 20):
            token_logprobs_triton(logits, torch.zeros(num_rows, dtype=torch.int64), num_top)
        if dtype == torch.float32:
            indices = (wide[start : start + num_rows] for start in (first, first + 500, first + 1000))
            slots = torch.zeros(20, VOCAB, dtype=torch.bool), torch.zeros(20, VOCAB, dtype=torch.int32)
            penalize_rows_triton(logits, *indices, *slots, matrix)
            words = num_words(VOCAB)
            masks = torch.zeros(20 * words + 4, dtype=torch.int32)[first : first + num_rows * words]
            mask_rows_triton(logits, columns[first : first + num_rows], masks.view(num_rows, words))


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    with compiling_for(int(sys.argv[1])) as compiled:
        for name in sys.argv[2:]:
            launch_all(getattr(torch, name))
    for kernel in {id(kernel): kernel for kernel in compiled}.values():
        print(json.dumps(resources(kernel)))
