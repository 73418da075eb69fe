"""Drafts of rows with grammars on their way to the engine, which masks the draws behind them.

Owns which drafts of a plan are reported, and their copy to the host: begun at the head of the step
that verifies them, so that it arrives while the device computes the forward pass, and sent when it
is there. Nothing waits for it but the masks. A step without such rows copies nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.plan import RowAdmission, StepPlan
from headrace_backend.worker.device_copies import indices_on_device
from headrace_backend.worker.plan_columns import ranges
from headrace_backend.worker.speculation.draws import num_drafts

Indices = npt.NDArray[np.int64]


class _Copy(NamedTuple):
    """Drafts of one step, and what says that they have arrived; None: they are there."""

    step_id: int
    tokens: torch.Tensor
    arrived: torch.cuda.Event | None

    def is_there(self) -> bool:
        """Whether its tokens may be read."""
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]


class ReportedDrafts:
    """Which rows have grammars, and the copies that were not sent yet."""

    def __init__(self, num_rows: int, send: Callable[[StepDrafts], None]) -> None:
        """No row is taken; `send` has the engine hear of a step's drafts."""
        self._is_masked = np.zeros(num_rows, bool)
        self._send = send
        self._copies: deque[_Copy] = deque()

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Takes new rows."""
        for admission in admissions:
            self._is_masked[admission.row] = admission.is_masked

    def report(self, plan: StepPlan, drafts: torch.Tensor) -> None:
        """Reports the drafts that a plan computes, if masks follow it.

        Args:
            plan: The plan.
            drafts: int32 [num_rows, most drafts] as rows have them, on the device.
        """
        if not plan.num_masked:
            return
        counts = num_drafts(plan.forward)
        chosen = (counts > 0) & self._is_masked[plan.forward.rows]
        if not chosen.any():
            return
        rows, counts = plan.forward.rows[chosen], counts[chosen]
        places: Indices = np.stack((np.repeat(rows, counts), ranges(np.zeros_like(counts), counts)))
        tokens = drafts[tuple(indices_on_device(places, drafts.device))].to("cpu", non_blocking=True)
        self._copies.append(_Copy(plan.step_id, tokens, _mark(drafts.device)))
        self.send_arrived()

    @property
    def is_unsent(self) -> bool:
        """Whether drafts are on their way that nobody has heard of."""
        return bool(self._copies)

    def send_arrived(self) -> None:
        """Sends what has arrived, in the order of the steps."""
        while self._copies and self._copies[0].is_there():
            copied = self._copies.popleft()
            self._send(StepDrafts(copied.step_id, copied.tokens.numpy()))

    def reset(self) -> None:
        """Forgets what was not sent: nobody waits for it any more."""
        self._copies.clear()


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """What is reached behind all that the device was given so far; None: everything is done."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
