"""Kernels that have not ended when the one behind them starts, in the interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from headrace_kernels import card


class KernelsAhead:
    """Stands for kernels that have not ended: what they write is poison until it is waited for.

    The first group of tensors is there behind the first wait of all, the second behind the first
    one that the second kernel makes. Kernels of the interpreter are launched early meanwhile.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, *written: tuple[torch.Tensor, ...]) -> None:
        self._written = [[(tensor, tensor.clone()) for tensor in group] for group in written]
        self.released = self.waits = 0
        # How many programs the first of two kernels has, each of which waits once.
        self.first_programs = 0
        monkeypatch.setattr(card, "launches_early", lambda device: True)
        monkeypatch.setattr(module, "grid_before_is_done", self._wait)
        monkeypatch.setattr(module, "grid_behind_may_start", self._release)
        for tensor, _ in (each for group in self._written for each in group):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    def _wait(self) -> None:
        self.waits += 1
        if self.waits in (1, self.first_programs + 1) and self._written:
            for tensor, value in self._written.pop(0):
                tensor.copy_(value)

    def _release(self) -> None:
        self.released += 1
