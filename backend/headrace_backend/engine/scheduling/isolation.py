"""Finds the request that makes steps fail, so that it ends and the others go on.

Owns who is suspected and who is on trial, and has the scheduler compute only those. Ends nothing
(the engine does).

A step fails if it raises, or if the worker hangs or dies while it is the last one begun. Whoever
took part in that step, or in one that was in flight before it (a device may report late), is a
suspect; everybody else waits. The worker begins anew, or another one does. Suspects are tried
alone, likely ones first: those that were still reading their prompt, then the newest. Each trial
that gets past the point of the failure doubles the number tried at once, so that a fault that does
not come again costs little. A trial that fails makes those on trial the suspects: fewer each time,
until one request is left. It is guilty if it has failed before, because one failure alone may be
anyone's: it ends with an error, and all the rest goes on: first those who have given tokens before,
until a step of theirs shows that the device works. So several such requests, one behind the other,
are told from a device that can compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence

from headrace_backend.engine.requests.sequence import LiveRequest, Sequence
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep
from headrace_backend.engine.scheduling.scheduler import Scheduler

# With so many found guilty and no step settled in between, it is rather the device that is at
# fault.
_MOST_IN_A_ROW = 3

GUILTY = "the worker failed, hung or died on this request twice, the second time on this one alone"


class Isolation:
    """Suspects, those on trial, and what they have to compute to be cleared."""

    __slots__ = (
        "_goals",
        "_num_found_in_a_row",
        "_num_settled_at_last",
        "_num_tried_at_once",
        "_on_trial",
        "_proves_device",
        "_scheduler",
        "_suspects",
        "active",
        "closer",
    )

    def __init__(self, scheduler: Scheduler) -> None:
        """Nobody is suspected."""
        self._scheduler = scheduler
        # Steps have to be tried.
        self.active = False
        # The last failure was one of a trial, and not one of many while no step succeeds at all.
        self.closer = False
        self._num_found_in_a_row = 0
        self._num_settled_at_last = 0
        # Likely ones last, to be popped.
        self._suspects: list[LiveRequest] = []
        self._on_trial: frozenset[LiveRequest] = frozenset()
        # Sequences of suspects, with the tokens that the failed steps would have computed.
        self._goals: dict[Sequence, int] = {}
        self._num_tried_at_once = 1
        # Those on trial are not suspected: any step of theirs ends the trial.
        self._proves_device = False

    def step_failed(
        self, in_flight: AbstractSequence[InFlightStep], failed_step_id: int, num_settled_steps: int
    ) -> LiveRequest | None:
        """Notes a failed step, before its sequences lose their rows.

        Returns who is guilty, if that is plain now.

        Args:
            in_flight: At least one, in order.
            failed_step_id: The last step in flight that may have failed; the oldest may have failed
                in any case.
            num_settled_steps: So far.
        """
        last_step_id = max(failed_step_id, in_flight[0].step_id)
        steps = [step for step in in_flight if step.step_id <= last_step_id]
        if num_settled_steps != self._num_settled_at_last:
            self._num_found_in_a_row = 0
        sequences = _sequences(steps)
        requests = list(dict.fromkeys(sequence.request for sequence in sequences))
        for request in requests:
            request.num_failed_steps += 1
        self.active = True
        # A trial never has all suspects, so those who are left now are fewer than before.
        self.closer = bool(self._on_trial) and self._num_found_in_a_row < _MOST_IN_A_ROW
        self._num_tried_at_once = 1
        self._suspects, self._on_trial, self._goals, self._proves_device = [], frozenset(), {}, False
        if len(requests) == 1 and requests[0].num_failed_steps > 1:
            self._num_found_in_a_row += 1
            self._num_settled_at_last = num_settled_steps
            self._proves_device = True
            return requests[0]
        self._goals = {sequence: sequence.num_computed for sequence in sequences}
        self._suspects = sorted(requests, key=_likelihood)
        return None

    def advance(self, num_in_flight: int, num_settled_steps: int, now_ns: int) -> bool:
        """Sees to it that only those on trial are computed, one step at a time.

        False: not before the step in flight is read.
        """
        if num_in_flight:
            return False
        if self._trial_is_over(num_settled_steps):
            self._next_trial(num_settled_steps)
            if self._on_trial:
                self._scheduler.try_alone(self._on_trial, now_ns)
            else:
                self._scheduler.try_nobody()
                self._goals, self.active = {}, False
        return True

    def _trial_is_over(self, num_settled_steps: int) -> bool:
        """Whether everyone on trial has ended, or has computed what failed before."""
        if self._proves_device and num_settled_steps == self._num_settled_at_last:
            return not any(request.active for request in self._on_trial)
        return all(
            sequence.ended or sequence.num_settled >= goal or _is_unused(sequence)
            for sequence, goal in self._goals.items()
            if sequence.request in self._on_trial
        )

    def _next_trial(self, num_settled_steps: int) -> None:
        """Clears the requests on trial and tries the likeliest of the remaining suspects."""
        self._proves_device &= num_settled_steps == self._num_settled_at_last and not self._on_trial
        if self._proves_device:
            requests = {sequence.request for sequence in self._scheduler.queued()}
            self._on_trial = frozenset(request for request in requests if request.num_output_tokens)
            return
        for request in self._on_trial:
            request.num_failed_steps = 0
        if self._on_trial:
            self._num_tried_at_once *= 2
        live = [request for request in self._suspects if request.active]
        first = max(0, len(live) - self._num_tried_at_once)
        self._suspects, self._on_trial = live[:first], frozenset(live[first:])


def _sequences(steps: Iterable[InFlightStep]) -> AbstractSequence[Sequence]:
    """Whoever took part and has not ended, each once."""
    taking_part: dict[Sequence, None] = {}
    for step in steps:
        taking_part.update(dict.fromkeys(step.samples))
        taking_part.update(dict.fromkeys(sequence for sequence, _, _ in step.chunks))
    return [sequence for sequence in taking_part if not sequence.ended]


def _is_unused(sequence: Sequence) -> bool:
    """Whether the sequence is one of a search that has no hypothesis for it any more."""
    return sequence.search is not None and not sequence.search.uses(sequence.log.output_index)


def _likelihood(request: LiveRequest) -> tuple[bool, int]:
    """Ascending: requests that have given no token yet are likeliest, then the newest."""
    return request.num_output_tokens == 0, request.sequence_number
