"""Sampled tokens on their way from the card to the host while the next step is already launched.

When the step that drew them was really done.

Owns the copies of one step and the event that says they have arrived: reading a tensor in the
ordinary way would wait for everything launched since. Owns the reckoning of times, too
(`FinishTimes`). While the loop launches a step, above all kernel by kernel, it cannot look whether
the one before is done; counted from when that is noticed, the one before would seem longer and the
one after it shorter than they are, and the engine would plan by it. The device's own clock tells
the time between the ends of two steps; the host's clock is right whenever the loop was looking, and
no step ended after it was noticed.
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
                finite=_to_host(sampled.finite),
                logprobs=None if logprobs is None else _logprobs_to_host(logprobs),
                prompts=None if sampled.prompts is None else _logprobs_to_host(sampled.prompts),
                checked=None if sampled.checked is None else _to_host(sampled.checked),
                counts=None if sampled.counts is None else _to_host(sampled.counts),
                draw_counts=sampled.draw_counts,
                num_lost_drafts=None if sampled.num_lost_drafts is None else _to_host(sampled.num_lost_drafts),
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
        """Nanoseconds of the device's clock from the end of `earlier` to the end of this step.

        Both steps are done; None on a CPU.
        """
        if self._arrived is None or earlier._arrived is None:
            return None
        return int(1e6 * earlier._arrived.elapsed_time(self._arrived))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)


def _logprobs_to_host(logprobs: Logprobs) -> Logprobs:
    return dataclasses.replace(logprobs, values=TokenLogprobs(*(_to_host(tensor) for tensor in logprobs.values)))


# The device's clock is taken to be slow by the most that two clocks drift: what it tells is then
# too late rather than too early, and set right by the host's whenever the loop was looking.
_DRIFT = 1.0002
# The device's clock counts in single-precision milliseconds; over longer pauses the host's is
# better.
_LONGEST_GAP_NS = 1_000_000_000


class FinishTimes:
    """Times at which steps finished, one after the other, in nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        """No step yet."""
        self._last: HostCopy | None = None
        self._last_at_ns = 0

    def of(self, samples: HostCopy, noticed_at_ns: int) -> int:
        """When a step was done whose samples were found there at `noticed_at_ns`."""
        at_ns = noticed_at_ns
        elapsed_ns = None if self._last is None else samples.elapsed_ns_since(self._last)
        if elapsed_ns is not None and elapsed_ns < _LONGEST_GAP_NS:
            at_ns = min(noticed_at_ns, self._last_at_ns + int(elapsed_ns * _DRIFT))
        self._last, self._last_at_ns = samples, at_ns
        return at_ns
