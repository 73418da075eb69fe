"""Drives the engine: results in, plans out, outboxes to the streams, deadlines in time.

Owns the order of these calls and the two timers, one for deadlines, a precise one for plans that
are held back. The engine is synchronous and single-threaded, so everything here runs in the event
loop's thread and nothing awaits. Does not own the rings (`worker_group`), nor what an outbox
becomes on the wire (`engine_service`).

A result's way: settle -> plan -> push (some steps ahead) -> take outboxes -> deliver. The workers
get their next plan before any stream gets its tokens, unless the engine holds it back: then the
timer asks for it. Masks of rows with grammars are begun in threads before the next plan is made,
and sent behind the plan of their step when they are there.

An exception out of the engine's own steps means that its state can't be trusted: it is logged once,
`failed` is set, and the process ends so that its supervisor starts another. An exception while one
request is added, attached or aborted stays with that request (`engine_service`).
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace_backend.engine.answers import LossOutcome
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.output_grammar import MaskOutcome
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.engine.scheduling.masks import MaskCall
from headrace_backend.server.logs import get_logger
from headrace_backend.server.precise_timer import PreciseTimer
from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.messages import RecordKind
from headrace_backend.step.plan import StepResult
from headrace_backend.structured_output.mask_pool import MaskPool

# Deadlines and the life of logs are looked at this often while there is work, and this often
# otherwise.
_BUSY_TICK_S = 0.05
_IDLE_TICK_S = 1.0
_MIN_TICK_S = 0.001

_Record = TypeVar("_Record", StepDrafts, StepResult)

# Takes what is to be sent, by stream id.
Deliver = Callable[[dict[int, Outbox]], None]
# Takes a record for the workers, and returns whether there was space for it.
SendRecord = Callable[[RecordKind, bytes | memoryview], bool]


class EngineLoop:
    """The engine's driver.

    Call `changed` after every call to `engine` that may have given it work or output.
    """

    def __init__(self, engine: Engine, clock: Callable[[], int], masks: MaskPool | None = None) -> None:
        """Joins its parts.

        Args:
            engine: The engine.
            clock: The one that the engine was given: CLOCK_MONOTONIC in ns.
            masks: Computes which tokens rows with grammars may draw; None: no request has one.
        """
        self.engine = engine
        self._masks = masks
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._log = get_logger()
        self._deliver: Deliver | None = None
        self._notice: Callable[[], None] | None = None
        self._send: SendRecord | None = None
        # Plans and masks for which the ring had no space yet, in order.
        self._unsent: deque[tuple[RecordKind, bytes | memoryview]] = deque()
        self._pump_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._plan_timer = PreciseTimer(self._loop, self._plan_is_due)
        # Plans handed to workers so far, over all lives.
        self.num_plans = 0
        # Set with the exception that ended the engine.
        self.failed: asyncio.Future[None] = self._loop.create_future()

    def start(self, deliver: Deliver, notice: Callable[[], None] | None = None) -> None:
        """Starts to drive the engine; outboxes go to `deliver` from now on.

        `notice` is called whenever the engine may have something to tell other engines.
        """
        self._deliver = deliver
        self._notice = notice
        self._tick()

    def stop(self) -> None:
        """Ends timers and refuses to be woken again."""
        self._deliver = None
        if self._timer is not None:
            self._timer.cancel()
        self._plan_timer.close()
        if self._masks is not None:
            self._masks.close()
        if not self.failed.done():
            self.failed.cancel()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.engine.has_work

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not settled."""
        return self.engine.num_in_flight

    # --- workers

    def workers_ready(
        self,
        send: SendRecord,
        num_blocks: int,
        on_gpu: bool,
        captured_mixed_sizes: tuple[int, ...],
        plan_bytes: int | None = None,
        tokens_per_row: int = 1,
        drafted_graphs: tuple[tuple[int, float], ...] = (),
        num_checkpoints: int = 0,
    ) -> None:
        """Starts sending plans of at most `plan_bytes` bytes to new workers.

        `send` returns whether there was space. A step settles at most `tokens_per_row` tokens
        for a row that decodes; `drafted_graphs` and `num_checkpoints` as `Engine.worker_ready`
        says.
        """
        self._send = send
        about_steps = (on_gpu, captured_mixed_sizes, plan_bytes, tokens_per_row, drafted_graphs)
        self._guarded(lambda: self.engine.worker_ready(num_blocks, *about_steps, num_checkpoints))

    @property
    def num_settled_steps(self) -> int:
        """Steps settled so far, over all lives of workers."""
        return self.engine.num_settled_steps

    @property
    def expected_step_s(self) -> float:
        """How long the oldest step in flight is expected to take; 0 without one."""
        return self.engine.expected_step_s

    def workers_lost(self, failed_step_id: int | None = None) -> LossOutcome:
        """Forgets the steps in flight: the workers are gone or have forgotten everything.

        `Engine.worker_lost` says what `failed_step_id` is.
        """
        outcome = LossOutcome()

        def lose() -> None:
            nonlocal outcome
            outcome = self.engine.worker_lost(failed_step_id)

        if self._send is not None:
            self._send = None
            self._unsent.clear()
            self._guarded(lose)
        return outcome

    def on_results(self, payloads: list[bytes], drafts: Sequence[bytes] = ()) -> None:
        """Takes step results, in order, as bytes, and drafts of steps that have none yet.

        Raises:
            ValueError: One is not the result of the oldest step in flight, or drafts are not those
                of their step: the workers are not to be trusted any more.
        """
        bad: ValueError | None = None

        def settle() -> None:
            nonlocal bad
            try:
                for payload in drafts:
                    self.engine.take_drafts(_decoded(StepDrafts, payload))
                for payload in payloads:
                    self.engine.settle(_decoded(StepResult, payload))
            except ValueError as error:
                bad = error

        if self._send is not None:
            self._guarded(settle)
        if bad is not None:
            raise bad

    # --- the pump

    def changed(self) -> None:
        """The engine may have work or output.

        Looks after it once per turn of the event loop, so that a burst of requests joins one step.
        """
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._scheduled_pump)

    def _scheduled_pump(self) -> None:
        self._pump_scheduled = False
        self._guarded(self.engine.expire)

    def flush(self) -> None:
        """Delivers what the engine has released so far, before an answer that must follow it."""
        if self._deliver is not None and (outboxes := self.engine.take_outboxes()):
            self._deliver(outboxes)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Runs `act`, then plans and delivers; an exception ends the process."""
        self._or_fail(lambda: self._and_go_on(act))

    def _and_go_on(self, act: Callable[[], None]) -> None:
        act()
        self._start_masks()
        self._push_plans()
        self.flush()
        if self._notice is not None:
            self._notice()

    def _or_fail(self, act: Callable[[], None]) -> None:
        """Runs `act` while the loop runs; an exception ends the process."""
        if self._deliver is None or self.failed.done():
            return
        try:
            act()
        except Exception as error:
            self._log.exception("engine failed")
            self.failed.set_exception(error)

    def _push_plans(self) -> None:
        # What is unsent waits for the workers, who are behind; their next result brings us back.
        while self._send is not None and self._sent_all(self._send):
            plan = self.engine.plan()
            if plan is None:
                self._await_plan()
                return
            self._unsent.append((RecordKind.STEP_PLAN, plan.encode()))
            if plan.num_masked:
                self._start_masks()

    def _sent_all(self, send: SendRecord) -> bool:
        """Sends what could not be sent before; False if there was no space for all of it."""
        while self._unsent:
            kind, record = self._unsent[0]
            if not send(kind, record):
                return False
            self._unsent.popleft()
            self.num_plans += kind == RecordKind.STEP_PLAN
        return True

    def _start_masks(self) -> None:
        """Begins to compute the masks whose tokens are known."""
        for call in self.engine.take_mask_calls():
            assert self._masks is not None, "requests with a grammar are taken where masks are computed"
            self._masks.start(call, self._on_masks, self._on_outcomes)

    # Called by one of the threads that compute masks.

    def _on_masks(self, call: MaskCall, masks: StepMasks, outcomes: list[MaskOutcome]) -> None:
        self._soon(self._send_masks, call, masks.encode(), outcomes)

    def _on_outcomes(self, call: MaskCall, outcomes: list[MaskOutcome]) -> None:
        self._soon(self._guarded, lambda: self.engine.masks_done(call, outcomes))

    def _soon(self, act: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(act, *args)
        except RuntimeError:
            # The loop is closed: the process ends.
            return

    def _send_masks(self, call: MaskCall, record: bytes | memoryview, outcomes: list[MaskOutcome]) -> None:
        if self._send is not None and self.engine.is_current(call):
            self._unsent.append((RecordKind.MASKS, record))
            self._sent_all(self._send)
        # Now, as the step's result may be read before the search for what must come is over. There
        # is nothing to plan or to deliver that could not wait for that.
        self._or_fail(lambda: self.engine.masks_filled(call, outcomes))

    def _await_plan(self) -> None:
        due_ns = self.engine.plan_due_ns
        if due_ns is not None:
            self._plan_timer.set(due_ns)

    def _plan_is_due(self) -> None:
        self._guarded(lambda: None)

    def _tick(self) -> None:
        self._guarded(self.engine.expire)
        if self._deliver is not None and not self.failed.done():
            self._timer = self._loop.call_later(self._tick_s(), self._tick)

    def _tick_s(self) -> float:
        if not self.engine.has_work:
            return _IDLE_TICK_S
        deadline_ns = self.engine.next_deadline_ns()
        if deadline_ns is None:
            return _BUSY_TICK_S
        return min(max((deadline_ns - self._clock()) / 1e9, _MIN_TICK_S), _BUSY_TICK_S)


def _decoded(kind: type[_Record], payload: bytes) -> _Record:
    try:
        return kind.decode(payload)
    except struct.error as error:
        raise ValueError(f"a {kind.__name__} that can't be read") from error
