"""Decides when to plan the step after the one in flight.

The plan is made as late as possible, so that a prompt that arrives meanwhile is in it.

Owns the prediction of when the step in flight ends, what is learned of its errors, and the moment
that follows. Reads no clock and plans nothing (the engine does both), and does not know what a step
costs (`step_time`). What was planned and settled goes in, moments come out; all times are
nanoseconds of CLOCK_MONOTONIC, which engine and worker share.

    step N      |------- computed -------------------------|
                                        due      expected end
                                         |<----- margin -->|
    step N+1                             plan, ring, launch|------- computed -----

The margin is what it takes from the moment due to a launched forward pass (planning, timer, ring,
the worker's own launching), the lead, plus what predictions err, each as large as all but one of
the last 128 steps needed. A step that the device had to wait for is a sample like any other, so a
margin too small grows with the second such step; a single accident does not make everybody wait for
a hundred steps.

A step with prompts is planned and launched by twice as much work as one of decodes alone, so each
kind has leads of its own. While no prompt waits, a plan is held back for as long as a step of
decodes allows. A prompt that arrives between the two moments due is planned at once: the device
waits for some of the difference, and the prompt would have waited for a step.

Decodes that take less than twice as long as launching one usually does are short, and of these one
more is planned ahead (`launching_binds`). Twice, because of several ranks the slowest one's
launching counts, of which nothing is known here, and because the way through the rings comes on
top. Usually, because a prompt that arrives meanwhile waits for one step more: with the longest
launch but one of 128 steps in its place, decodes of 4 ms were short on hosts that launch in 0.8 ms
(docs/experiments.md, "why first tokens took longer than simulated").

Nothing is held back before enough is known, where little would be gained, and where launching is so
slow that it has to be hidden behind the step before (a CPU, a GPU without graphs: `worker_ready`).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from typing import Final

# Steps that a margin is learned from, and how many of them may have needed more: with 4, 56 plans
# of a run of poisson15 on an H200 came too late, with 1 19, and nobody waited longer for a first
# token.
_REMEMBERED: Final = 128
_EXCEEDED: Final = 1
# With fewer nothing is held back.
_ENOUGH: Final = 24
# A step that takes less than so many usual leads is short.
_SHORT_STEP_LEADS: Final = 2
# Holding a plan back for less gains less than a late step costs.
_LEAST_HOLD_NS: Final = 1_000_000
# A prediction may be as wrong as it likes.
_LONGEST_HOLD_NS: Final = 1_000_000_000


class RecentLimit:
    """A limit that all but one of the last samples stay within."""

    __slots__ = ("_in_order", "_in_time")

    def __init__(self) -> None:
        """No sample yet."""
        self._in_time: deque[float] = deque()
        self._in_order: list[float] = []

    @property
    def known(self) -> bool:
        """Whether there are enough samples."""
        return len(self._in_time) >= _ENOUGH

    @property
    def value(self) -> float:
        """The sample that few of the last ones exceed; the largest while few exist.

        It is 0 without samples.
        """
        return self._in_order[-1 - self._num_beyond] if self._in_order else 0.0

    @property
    def typical(self) -> float:
        """The sample in the middle of the last ones; 0 without samples."""
        return self._in_order[len(self._in_order) // 2] if self._in_order else 0.0

    @property
    def least(self) -> float:
        """The sample that few of the last ones fall below; the smallest while few exist."""
        return self._in_order[self._num_beyond] if self._in_order else 0.0

    @property
    def _num_beyond(self) -> int:
        return len(self._in_order) * _EXCEEDED // _REMEMBERED

    def add(self, sample: float) -> None:
        """Adds a sample; the oldest gives way."""
        if len(self._in_time) == _REMEMBERED:
            del self._in_order[bisect.bisect_left(self._in_order, self._in_time.popleft())]
        self._in_time.append(sample)
        bisect.insort(self._in_order, sample)


@dataclasses.dataclass(slots=True)
class _PlannedStep:
    # When it was due, or asked for if nobody held it back.
    asked_at_ns: int
    held: bool
    mixed: bool
    replayed: bool
    duration_ns: float
    # As soon as the end of the step before is known, or there is none.
    expected_end_ns: float | None = None


class PlanTiming:
    """The moments at which plans are due. In flight are at most as many steps as the engine has."""

    __slots__ = (
        "_asked_at_ns",
        "_denied_at_ns",
        "_device_free_ns",
        "_due_ns",
        "_errors",
        "_has_prompts",
        "_held",
        "_holds",
        "_in_flight",
        "_launched_at_ns",
        "_leads",
        "num_held",
        "num_late",
    )

    def __init__(self) -> None:
        """Nothing is known, and nothing is held back."""
        # Over all lives of workers: steps whose plan was held back, and those of them that the
        # device waited for.
        self.num_held = 0
        self.num_late = 0
        self.worker_ready(holds=False)

    def worker_ready(self, holds: bool) -> None:
        """Another worker, of which nothing is known, takes plans from now on.

        `holds`: whether it launches steps fast enough for plans to be held back.
        """
        self._holds = holds
        self._in_flight: deque[_PlannedStep] = deque()
        # From asking for a plan to its launched forward pass, of steps without and with prompts.
        self._leads = (RecentLimit(), RecentLimit())
        # What steps without and with prompts took less than predicted, as a share of the
        # prediction.
        self._errors = (RecentLimit(), RecentLimit())
        # Of the step settled last.
        self._device_free_ns = 0
        self._launched_at_ns = 0
        # Set while a plan is held back: when it is due without and with prompts. Whether any wait,
        # and when it was last asked for too early; 0: it was not.
        self._due_ns: tuple[int, int] | None = None
        self._has_prompts = False
        self._denied_at_ns = 0
        # Of the plan that is being made.
        self._asked_at_ns = 0
        self._held = False

    @property
    def due_ns(self) -> int | None:
        """The time until which the next plan is held back; None if it is not."""
        return None if self._due_ns is None else self._due_ns[self._has_prompts]

    @property
    def holds(self) -> bool:
        """Whether plans may be held back, so that it matters what waits."""
        return self._holds

    @property
    def knows_due(self) -> bool:
        """Whether it can say when a plan is due, so that a plan may wait until then."""
        return self._holds and any(lead.known for lead in self._leads)

    @property
    def launching_binds(self) -> bool:
        """Whether all steps in flight are so short that one more is to be planned before any ends.

        A prompt that arrives meanwhile waits one short step longer. Steps with prompts are never
        short; nor is any before enough is known, or where launching is slow in any case.
        """
        return self.knows_due and all(self._is_short(step) for step in self._in_flight)

    def may_plan(self, now_ns: int, worthwhile: bool, has_prompts: bool = False) -> bool:
        """Whether the next step is to be planned now.

        `planned` follows if there is anything to plan.

        Args:
            now_ns: The time.
            worthwhile: Whether anybody who comes later could join a step that is planned later.
                Asked once per step.
            has_prompts: Whether prompts wait to be computed.
        """
        self._has_prompts = has_prompts
        if self._in_flight and self._due_ns is None and worthwhile:
            self._due_ns = self._choose_due_ns(now_ns)
        due_ns = self.due_ns
        if self._in_flight and due_ns is not None and now_ns < due_ns:
            self._denied_at_ns = now_ns
            return False
        self._held = self._denied_at_ns > 0
        self._asked_at_ns = now_ns
        # A timer may be late; but a plan that is due because a prompt has arrived was not before.
        if due_ns is not None and due_ns > self._denied_at_ns:
            self._asked_at_ns = min(now_ns, due_ns)
        self._due_ns, self._denied_at_ns = None, 0
        return True

    def planned(self, predicted_us: float, mixed: bool, replayed: bool = True) -> None:
        """Notes that the step for which `may_plan` was asked goes to the worker.

        Args:
            predicted_us: How long it is predicted to take.
            mixed: Whether it has prompts.
            replayed: Whether it is launched at once, as a graph. The device begins with the first
                kernel of any other, so that the end of its launching tells nothing, and what waits
                for another step's masks is not launched before them.
        """
        step = _PlannedStep(self._asked_at_ns, self._held, mixed, replayed, 1e3 * predicted_us)
        self.num_held += self._held
        if not self._in_flight:
            self._expect(step)
        self._in_flight.append(step)

    def settled(self, launched_at_ns: int, finished_at_ns: int) -> None:
        """The oldest step in flight was launched (0: nobody knows) and done at these times."""
        step = self._in_flight.popleft()
        if launched_at_ns:
            self._learn(step, launched_at_ns, finished_at_ns)
        self._device_free_ns, self._launched_at_ns = finished_at_ns, launched_at_ns
        if self._in_flight:
            self._expect(self._in_flight[0])

    def _is_short(self, step: _PlannedStep) -> bool:
        is_known_decode = step.replayed and not step.mixed and step.duration_ns > 0
        return is_known_decode and step.duration_ns < _SHORT_STEP_LEADS * self._leads[False].typical

    def _learn(self, step: _PlannedStep, launched_at_ns: int, finished_at_ns: int) -> None:
        began_ns = self._device_free_ns
        if step.replayed:
            began_ns = max(began_ns, launched_at_ns)
            self.num_late += step.held and launched_at_ns > self._device_free_ns
            # A worker that was still launching the step before says nothing of how long it takes to
            # launch one.
            if step.asked_at_ns >= self._launched_at_ns:
                self._leads[step.mixed].add(launched_at_ns - step.asked_at_ns)
        # Where it is not known when the device began, it was busy until it did.
        if step.duration_ns > 0 and (step.replayed or step.asked_at_ns < self._device_free_ns):
            self._errors[step.mixed].add((began_ns + step.duration_ns - finished_at_ns) / step.duration_ns)

    def _expect(self, step: _PlannedStep) -> None:
        """All steps before it are done.

        One that the device waits for is taken to be launched fast, or its successor would be late
        too.
        """
        least_ns = self._leads[step.mixed].least
        step.expected_end_ns = max(step.asked_at_ns + least_ns, self._device_free_ns) + step.duration_ns

    def _choose_due_ns(self, now_ns: int) -> tuple[int, int] | None:
        """When to plan the step after the one in flight, without and with prompts; None: now."""
        step = self._in_flight[-1]
        error = self._errors[step.mixed]
        if not self.knows_due or step.expected_end_ns is None or not error.known:
            return None
        decode_lead_ns, mixed_lead_ns = self._lead_ns(False), self._lead_ns(True)
        hold_ns = step.expected_end_ns - max(0.0, error.value) * step.duration_ns - decode_lead_ns - now_ns
        hold_ns = min(hold_ns, _LONGEST_HOLD_NS)
        if hold_ns < _LEAST_HOLD_NS:
            return None
        sooner_ns = max(0.0, mixed_lead_ns - decode_lead_ns)
        return now_ns + int(hold_ns), now_ns + int(max(0.0, hold_ns - sooner_ns))

    def _lead_ns(self, mixed: bool) -> float:
        """The most that a step of a kind needs before it runs, or of the other if none is known."""
        lead = self._leads[mixed]
        return lead.value if lead.known else self._leads[not mixed].value
