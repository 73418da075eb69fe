"""Sampled tokens on their way from the card to the host, while the next step is already launched.

Owns the copies of one step and the event that says they have arrived. Reading a tensor in the
ordinary way would wait for everything launched since.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

from headrace_backend.step.plan import StepResult
from headrace_backend.worker.sampling.prompt_logprobs import PromptLogprobs
from headrace_backend.worker.sampling.sampler import SampledLogprobs, SampledTokens
from headrace_kernels.sampling.logprobs import TokenLogprobs

Logprobs = TypeVar("Logprobs", SampledLogprobs, PromptLogprobs)


class HostCopy:
    """One step's samples, if it has any, and its end. On a CPU they are there at once."""

    def __init__(self, sampled: SampledTokens | None, device: torch.device) -> None:
        """Starts the copies, behind what has been launched on the device so far."""
        self._sampled = sampled
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cpu":
            return
        if sampled is not None:
            # Pinned by torch, as they are asked for without waiting.
            logprobs = sampled.logprobs
            self._sampled = SampledTokens(
                tokens=_to_host(sampled.tokens),
                sound=_to_host(sampled.sound),
                logprobs=None if logprobs is None else _logprobs_to_host(logprobs),
                prompts=None if sampled.prompts is None else _logprobs_to_host(sampled.prompts),
                checked=None if sampled.checked is None else _to_host(sampled.checked),
            )
        # Blocking: who waits sleeps instead of spinning.
        self._arrived = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._arrived.record()

    def is_there(self) -> bool:
        """Whether `fill` would not wait."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def fill(self, result: StepResult) -> None:
        """Waits for the copies and writes the columns of a result."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._sampled is not None:
            self._sampled.fill(result)

    def elapsed_ns_since(self, earlier: HostCopy) -> int | None:
        """By the device's clock, from the end of an earlier step to the end of this one, both
        there; None on a CPU.
        """
        if self._arrived is None or earlier._arrived is None:
            return None
        return int(1e6 * earlier._arrived.elapsed_time(self._arrived))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)


def _logprobs_to_host(logprobs: Logprobs) -> Logprobs:
    return dataclasses.replace(logprobs, values=TokenLogprobs(*(_to_host(tensor) for tensor in logprobs.values)))
