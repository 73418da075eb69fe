"""Sampling parameters per row, as columns.

Owns how a row's parameters are stored and which *traits* they give it: what the row costs beyond its most likely token. Does not own what grows while the
row generates (`penalty_slots`, `logit_changes`).
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt
import torch

from headrace_backend.step_plan import Int32Column, RowAdmission, UInt8Column
from headrace_kernels.penalties import Penalties
from headrace_kernels.philox import NoiseKeys
from headrace_kernels.sampling import Truncation


class Trait(enum.IntFlag):
    """What a row needs besides its most likely token."""

    RANDOM = 1
    # With RANDOM: top_k, min_p or top_p leave something out.
    TRUNCATED = 2
    # Bias, min_tokens or bad words.
    CHANGED_LOGITS = 4
    PENALIZED = 8
    LOGPROBS = 16


def traits_of(admission: RowAdmission) -> Trait:
    """The traits that an admission's parameters give its row."""
    traits = Trait(0)
    if admission.temperature > 0:
        traits |= Trait.RANDOM
        if admission.top_k > 0 or admission.min_p > 0 or admission.top_p < 1:
            traits |= Trait.TRUNCATED
    if admission.logit_bias_ids or admission.bad_words or (admission.min_tokens and admission.stop_token_ids):
        traits |= Trait.CHANGED_LOGITS
    if admission.repetition_penalty != 1 or admission.presence_penalty or admission.frequency_penalty:
        traits |= Trait.PENALIZED
    if admission.num_logprobs >= 0:
        traits |= Trait.LOGPROBS
    return traits


class _Column:
    """One value per row, on the host and on the device (on a CPU the same memory)."""

    def __init__(self, num_rows: int, dtype: type[np.generic], device: torch.device) -> None:
        self._host: npt.NDArray[np.generic] = np.zeros(num_rows, dtype)
        self._tensor = torch.from_numpy(self._host).to(device)
        self._is_shared = device.type == "cpu"

    def write(self, rows: npt.NDArray[np.int64], values: list[float] | list[int]) -> None:
        self._host[rows] = values
        if not self._is_shared:
            device = self._tensor.device
            self._tensor[torch.from_numpy(rows).to(device)] = torch.from_numpy(self._host[rows]).to(device)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        return self._tensor.index_select(0, rows)


class RowParameters:
    """The columns of all rows. `rows` are int64 tensors on the device where values are read, numpy where they are written."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._temperature = _Column(num_rows, np.float32, device)
        self._min_p = _Column(num_rows, np.float32, device)
        self._top_p = _Column(num_rows, np.float32, device)
        self._top_k = _Column(num_rows, np.int64, device)
        self._repetition = _Column(num_rows, np.float32, device)
        self._presence = _Column(num_rows, np.float32, device)
        self._frequency = _Column(num_rows, np.float32, device)
        self._seed = _Column(num_rows, np.int64, device)
        self._output_index = _Column(num_rows, np.int64, device)
        self.traits: UInt8Column = np.zeros(num_rows, np.uint8)
        # Number of top tokens to report, -1 for no log probabilities.
        self.num_logprobs: Int32Column = np.full(num_rows, -1, np.int32)

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Takes the parameters of new rows."""
        rows = np.array([admission.row for admission in admissions], np.int64)
        self._temperature.write(rows, [a.temperature for a in admissions])
        self._min_p.write(rows, [a.min_p for a in admissions])
        self._top_p.write(rows, [a.top_p for a in admissions])
        self._top_k.write(rows, [a.top_k if 0 < a.top_k < self._vocab_size else 0 for a in admissions])
        self._repetition.write(rows, [a.repetition_penalty for a in admissions])
        self._presence.write(rows, [a.presence_penalty for a in admissions])
        self._frequency.write(rows, [a.frequency_penalty for a in admissions])
        self._seed.write(rows, [_signed(a.seed) for a in admissions])
        self._output_index.write(rows, [a.output_index for a in admissions])
        self.traits[rows] = [traits_of(a) for a in admissions]
        self.num_logprobs[rows] = [a.num_logprobs for a in admissions]

    def temperature(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows]."""
        return self._temperature.read(rows)

    def truncation(self, rows: torch.Tensor) -> Truncation:
        """Which tokens the rows may draw."""
        return Truncation(self._top_k.read(rows), self._min_p.read(rows), self._top_p.read(rows))

    def penalties(self, rows: torch.Tensor) -> Penalties:
        """Strengths of the rows' penalties."""
        return Penalties(self._repetition.read(rows), self._presence.read(rows), self._frequency.read(rows))

    def noise_keys(self, rows: torch.Tensor, positions: torch.Tensor) -> NoiseKeys:
        """Keys of the rows' noise at positions of their outputs, int64 [num_rows]."""
        return NoiseKeys(self._seed.read(rows), self._output_index.read(rows), positions)


def _signed(seed: int) -> int:
    """The int64 of the same 64 bits."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
