"""What telemetry costs the engine: CPU time of plan, encode, settle and outboxes per token.

It is measured with telemetry off, on without recording, and with every request recorded.

Three engines of 64 decoding rows take turns of some steps each, so that whatever else the machine
does meets all of them alike; differences are of neighbouring turns. Requests end and are replaced
by others, so that the end of a recorded one counts too. Telemetry that is on includes what its
steps cost until they are bytes for the socket: a fact each `STEPS_PER_FACT` steps (50 ms of steps
of 10 ms), and their records for one service, then and when a recorded request ends.
"""

from __future__ import annotations

import gc
import itertools
import pathlib
import statistics
import time
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace_backend.config import EngineConfig
from headrace_backend.engine.engine import Engine
from headrace_backend.engine.events import RequestDone
from headrace_backend.engine.request import EngineRequest, ModelLimits, Recording, Subscriber
from headrace_backend.engine.requests.outbox import Outbox
from headrace_backend.engine.step_log import StepLog
from headrace_backend.step.plan import StepPlan, StepResult
from headrace_facts import facts
from headrace_request.request import Request
from headrace_request.stop import Stop

VOCAB_SIZE = 32_000
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 256
STEPS_PER_FACT = 5
STEPS_PER_TURN = 40
_BLOCK_SIZE: Literal[16] = 16
_SPAN = facts.SpanContext("ab" * 16, "cd" * 8, sampled=True)


class Mode(NamedTuple):
    """What is switched on."""

    name: str
    tells: bool
    records: bool


MODES = (Mode("off", False, False), Mode("on", True, False), Mode("recorded", True, True))


class Turns:
    """One engine at work, and what its steps cost."""

    def __init__(self, mode: Mode, rows: int) -> None:
        """A full batch that decodes; outputs end at different steps."""
        self.mode = mode
        config = EngineConfig(
            model=pathlib.Path("none"),
            block_size=_BLOCK_SIZE,
            max_num_seqs=rows,
            max_num_batched_tokens=2048,
            max_logs=rows,
        )
        limits = ModelLimits(VOCAB_SIZE, PROMPT_TOKENS + OUTPUT_TOKENS, (2,))
        self.steps = StepLog("00" * 8, 0)
        self.engine = Engine(config, limits, None, time.monotonic_ns, steps=self.steps)
        self.engine.worker_ready(rows * (1 + (PROMPT_TOKENS + OUTPUT_TOKENS) // _BLOCK_SIZE))
        self._reader = None
        if mode.tells:
            self.steps.tells = True
            self._reader = self.steps.reader()
        self._generator = np.random.default_rng(0)
        self._numbers = itertools.count(1)
        self._plans: list[bytes] = []
        self._num_steps = 0
        self.num_tokens = 0
        self.num_fact_bytes = 0
        for row in range(rows):
            self._add(1 + OUTPUT_TOKENS * (row + 1) // rows)
        self._num_rows = rows
        self.turn(OUTPUT_TOKENS)

    def _add(self, max_tokens: int = OUTPUT_TOKENS) -> None:
        number = next(self._numbers)
        prompt = self._generator.integers(3, VOCAB_SIZE, PROMPT_TOKENS, np.int32)
        end_of_text = np.array([2], np.int32).tobytes()
        request = EngineRequest(
            request_id=f"r{number}",
            asked=Request(prompt.tobytes(), Stop(min(max_tokens, OUTPUT_TOKENS), token_ids=end_of_text)),
            span=_SPAN if self.mode.records else None,
            recording=Recording() if self.mode.records else None,
        )
        self.engine.add(request, Subscriber(1, number))

    def turn(self, num_steps: int) -> float:
        """Microseconds of CPU time per token over so many steps.

        The worker's part and arrivals do not count.
        """
        cpu_ns = num_tokens = 0
        for _ in range(num_steps):
            began_ns = time.thread_time_ns()
            while (plan := self.engine.plan()) is not None:
                self._plans.append(plan.encode())
            cpu_ns += time.thread_time_ns() - began_ns
            result, count = _answer(self._plans.pop(0), self._generator)
            num_tokens += count
            began_ns = time.thread_time_ns()
            self.engine.settle(StepResult.decode(result))
            ends = False
            for outbox in self.engine.take_outboxes().values():
                outbox.tokens.tobytes(), outbox.handles.tobytes(), outbox.output_indices.tobytes()
                ends = ends or _ends_recorded(outbox)
            self._tell(ends)
            cpu_ns += time.thread_time_ns() - began_ns
            for _ in range(self._num_rows - sum(1 for _ in self.engine.active_requests())):
                self._add()
        self.num_tokens += num_tokens
        return cpu_ns / 1e3 / max(num_tokens, 1)

    def _tell(self, ends_recorded: bool) -> None:
        """Reports a step in the way of `server.service_stream` and `server.telemetry`."""
        if self._reader is None:
            return
        self._num_steps += 1
        is_due = self._num_steps % STEPS_PER_FACT == 0
        if is_due or ends_recorded:
            self._reader.take()
        if is_due and (steps := self.steps.take_steps()) is not None:
            self.num_fact_bytes += len(facts.encode(steps))


def _ends_recorded(outbox: Outbox) -> bool:
    return any(isinstance(event, RequestDone) and event.engine_trace for _, event in outbox.events)


def _answer(encoded: bytes, generator: np.random.Generator) -> tuple[bytes, int]:
    plan = StepPlan.decode(encoded)
    tokens = generator.integers(3, VOCAB_SIZE, plan.sample.rows.size, np.int32)
    now_ns = time.monotonic_ns()
    finite, checked = np.ones(tokens.size, np.uint8), np.ones(plan.forward.checked_indices.size, np.uint8)
    result = StepResult(plan.step_id, now_ns, now_ns, tokens, finite, checked_ok=checked)
    return result.encode(), tokens.size


def _interval(differences: list[float]) -> tuple[float, float, float]:
    """The median, and its 95% interval by resampling."""
    values = np.array(differences)
    draws = np.random.default_rng(0).choice(values, (2000, values.size))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return statistics.median(differences), float(low), float(high)


def turns_us(rows: int, num_turns: int, num_steps: int = STEPS_PER_TURN) -> tuple[dict[str, list[float]], Turns]:
    """Microseconds per token of so many turns of `num_steps`, by mode.

    Returns them with the engine that recorded.
    """
    engines = [Turns(mode, rows) for mode in MODES]
    gc.collect()
    gc.freeze()
    gc.disable()
    times: dict[str, list[float]] = {mode.name: [] for mode in MODES}
    for number in range(num_turns):
        # Nobody always goes first.
        for index in range(len(engines)):
            turns = engines[(number + index) % len(engines)]
            times[turns.mode.name].append(turns.turn(num_steps))
    gc.enable()
    gc.unfreeze()
    return times, engines[-1]


def measure(rows: int, num_turns: int) -> dict[str, Any]:
    """Microseconds per token of all modes, and the differences that telemetry makes."""
    times, reported = turns_us(rows, num_turns)
    result: dict[str, Any] = {f"{name}_us": round(statistics.median(values), 4) for name, values in times.items()}
    for later, earlier in (("on", "off"), ("recorded", "on")):
        differences = [a - b for a, b in zip(times[later], times[earlier], strict=True)]
        median, low, high = _interval(differences)
        result[f"{later}_beyond_{earlier}_us"] = [round(value, 4) for value in (median, low, high)]
    result["fact_bytes_per_token"] = round(reported.num_fact_bytes / reported.num_tokens, 2)
    return {"rows": rows, "turns": num_turns, **result}


def run(rows: tuple[int, ...] = (1, 64, 256), num_turns: int = 120) -> list[dict[str, Any]]:
    """All batch sizes, printed."""
    results = []
    print("rows   off us   on us  recorded us   on - off            recorded - on        (per token; median, 95%)")
    for count in rows:
        result = measure(count, num_turns)
        results.append(result)
        on, recorded = result["on_beyond_off_us"], result["recorded_beyond_on_us"]
        print(
            f"{count:4d}  {result['off_us']:7.3f} {result['on_us']:7.3f}  {result['recorded_us']:11.3f}   "
            f"{on[0]:6.3f} [{on[1]:.3f}, {on[2]:.3f}]  {recorded[0]:6.3f} [{recorded[1]:.3f}, {recorded[2]:.3f}]"
        )
    return results
