"""Sampling parameters per row, as one matrix.

Owns the values of the matrix that `headrace_kernels.sampling.parameters` describes, its way to the
device, and which *traits* a row's parameters give it: what the row costs beyond its most likely
token. Does not own what grows while the row generates (`penalty_slots`, `logit_changes`).

The host writes its own copy, then sends the rows that changed: one packed copy and one scatter per
step with admissions, behind the steps that were launched before. On a CPU both are the same memory.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt
import torch

from headrace_backend.step.plan import Int32Column, RowAdmission, UInt8Column
from headrace_backend.worker.device_copies import copy_to_device
from headrace_kernels.sampling import parameters as columns


class Trait(enum.IntFlag):
    """What a row needs besides its most likely token."""

    RANDOM = 1
    # Bias, min_tokens or bad words.
    CHANGED_LOGITS = 2
    PENALIZED = 4
    LOGPROBS = 8
    # A grammar says which tokens it may draw.
    MASKED = 16


def traits_of(admission: RowAdmission) -> Trait:
    """The traits that an admission's parameters give its row."""
    traits = Trait(0)
    sampling = admission.sampling
    if sampling.temperature > 0:
        traits |= Trait.RANDOM
    if sampling.logit_bias_ids or sampling.bad_words or (admission.min_tokens and admission.stop_token_ids):
        traits |= Trait.CHANGED_LOGITS
    if sampling.penalizes:
        traits |= Trait.PENALIZED
    if admission.num_logprobs >= 0:
        traits |= Trait.LOGPROBS
    if admission.is_masked:
        traits |= Trait.MASKED
    return traits


class RowParameters:
    """The matrix, on the host and on the device, and the traits of all rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Starts with greedy rows.

        Args:
            num_rows: Rows that can be admitted; one more stays greedy, for padding.
            vocab_size: A top_k from here on keeps all tokens.
            device: Device on which the matrix is read.
        """
        self._vocab_size = vocab_size
        self._device = device
        # int64 pairs: what indexes a scatter on the device travels beside the values it scatters.
        self._host: npt.NDArray[np.int64] = np.zeros((num_rows + 1, columns.NUM_COLUMNS // 2), np.int64)
        self._target = torch.from_numpy(self._host).to(device)
        # int32 [num_rows + 1, 16] on the device. Its address never changes: captured graphs read
        # it.
        self.matrix: torch.Tensor = self._target.view(torch.int32)
        self.traits: UInt8Column = np.zeros(num_rows + 1, np.uint8)
        # Number of top tokens to report, -1 for no log probabilities.
        self.num_logprobs: Int32Column = np.full(num_rows + 1, -1, np.int32)

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Takes the parameters of new rows."""
        rows = np.array([admission.row for admission in admissions], np.int64)
        values = self._pack(admissions)
        self._host[rows] = values
        self.traits[rows] = [traits_of(a) for a in admissions]
        self.num_logprobs[rows] = [a.num_logprobs for a in admissions]
        if self._device.type != "cpu":
            packed = copy_to_device(np.concatenate((rows[:, None], values), axis=1), self._device)
            self._target.index_copy_(0, packed[:, 0], packed[:, 1:])

    def _pack(self, admissions: list[RowAdmission]) -> npt.NDArray[np.int64]:
        """Rows of the matrix, as int64 pairs [num_admissions, 8]."""
        packed = np.zeros((len(admissions), columns.NUM_COLUMNS // 2), np.int64)
        floats, ints, words = packed.view(np.float32), packed.view(np.int32), packed.view(np.uint32)
        samplings = [admission.sampling for admission in admissions]
        for name, column in columns.FLOATS.items():
            floats[:, column] = [getattr(sampling, name) for sampling in samplings]
        ints[:, columns.TOP_K] = [s.top_k if 0 < s.top_k < self._vocab_size else 0 for s in samplings]
        words[:, columns.SEED_LOW] = [s.seed & 0xFFFFFFFF for s in samplings]
        words[:, columns.SEED_HIGH] = [s.seed >> 32 & 0xFFFFFFFF for s in samplings]
        ints[:, columns.OUTPUT_INDEX] = [admission.output_index for admission in admissions]
        return packed
