"""Draws of rows that are dealt out to ranks, against the same draws from whole logits.

Owns random mixtures: rows that come, go and come back with their history, every option, masks, rows
without finite logits. As a program one rank of several, which raises where any token differs:

    python -m tests.parallel.dealt_rows --seat ... --device cpu --seeds 3
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
from typing import Any

import numpy as np
import torch
from benchmarks import rank_processes
from tests.worker.driver import admission, column, id_bytes

from headrace_backend.parallel import row_dealer
from headrace_backend.parallel.collectives import Collectives
from headrace_backend.parallel.rendezvous import Seat
from headrace_backend.parallel.row_dealer import RowDealer
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.step.plan import RowAdmission, SamplePlan
from headrace_backend.worker.sampling.dealt_draws import DealtDraws
from headrace_backend.worker.sampling.sampler import SampledTokens, Sampler

NUM_ROWS = 11
# Parts of two, three, four and eight ranks.
VOCAB_SIZE = 96
NUM_STEPS = 12
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1, "top_n_sigma": 1.5},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.8, "frequency_penalty": 0.7},
    {"logit_bias_ids": id_bytes(4, 70), "logit_bias_values": np.float32([4, -3]).tobytes()},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": id_bytes(*range(40))},
    {"bad_words": (id_bytes(11), id_bytes(12, 13), id_bytes(5, 6, 7)), "temperature": 0.5},
    {"is_masked": True, "temperature": 1.0},
)


@dataclasses.dataclass
class Output:
    """What a row generates."""

    row: int
    options: dict[str, Any]
    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)

    def admission(self) -> RowAdmission:
        """Its row as it is taken, at first and after a preemption."""
        history = {"prompt_ids": id_bytes(*self.prompt), "output_ids": id_bytes(*self.tokens)}
        return admission(self.row, **self.options, **history)


class Mixture:
    """Steps that are drawn alike on all ranks, whatever they generate."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self.outputs: list[Output] = []

    def released(self) -> list[int]:
        """Rows of outputs that end, and of some that are preempted, whose rows are others now."""
        ended = [output for output in self.outputs if self._draw.random() < 0.15]
        preempted = [output for output in self.outputs if output not in ended and self._draw.random() < 0.15]
        rows = [output.row for output in (*ended, *preempted)]
        self.outputs = [output for output in self.outputs if output not in ended]
        for output in preempted:
            output.row = -1
        return rows

    def admissions(self) -> list[RowAdmission]:
        """Takes rows for what was preempted and for new outputs."""
        free = sorted(set(range(NUM_ROWS)) - {output.row for output in self.outputs})
        self._draw.shuffle(free)
        back = [output for output in self.outputs if output.row < 0]
        room = len(free) - len(back)
        new = [self._new_output() for _ in range(self._draw.randint(0 if self.outputs else 1, room))]
        self.outputs += new
        for output in (*back, *new):
            output.row = free.pop()
        return [output.admission() for output in (*back, *new)]

    def _new_output(self) -> Output:
        options = dict(self._draw.choice(OPTIONS), seed=self._draw.getrandbits(63))
        if self._draw.random() < 0.02:
            options["num_logprobs"] = 2
        return Output(-1, options, [self._draw.randrange(VOCAB_SIZE) for _ in range(5)])

    def drawing(self) -> list[Output]:
        """Outputs that draw in this step, in any order."""
        count = self._draw.randint(1, len(self.outputs))
        return self._draw.sample(self.outputs, count)

    def logits(self, num_rows: int) -> torch.Tensor:
        """Whole logits of a step, some of them equal, some not finite."""
        found = self._numbers.normal(0, 3, (num_rows, VOCAB_SIZE)).astype(np.float32).round(1)
        for row in range(num_rows):
            if self._draw.random() < 0.1:
                found[row, self._draw.randrange(VOCAB_SIZE)] = self._draw.choice([np.nan, np.inf])
            elif self._draw.random() < 0.05:
                found[row] = -np.inf
        return torch.from_numpy(found)

    def masks(self, step_id: int, drawing: list[Output]) -> StepMasks | None:
        """Masks of those whose rows have some, or of none of them, as where they have ended."""
        samples = [place for place, output in enumerate(drawing) if output.options.get("is_masked")]
        if not samples:
            return None
        samples = samples if self._draw.random() < 0.8 else samples[1:]
        words = self._numbers.integers(-(2**31), 2**31, (len(samples), mask_words(VOCAB_SIZE)), dtype=np.int32)
        return StepMasks(step_id, column(*samples), column(*(0 for _ in samples)), words)


class Drawing:
    """One rank's two samplers: one draws from whole logits, the other a share of the rows."""

    def __init__(self, collectives: Collectives) -> None:
        device = collectives.device
        self._alone, self._sharing = (Sampler(NUM_ROWS, VOCAB_SIZE, device) for _ in range(2))
        dealt = DealtDraws.of(RowDealer.of(collectives, VOCAB_SIZE), self._sharing)
        assert dealt is not None
        self._dealt, self._device = dealt, device
        size = VOCAB_SIZE // collectives.world_size
        self._part = slice(collectives.rank * size, (collectives.rank + 1) * size)
        # Steps that were dealt out, and rows without a finite logit in them.
        self.num_dealt = self.num_not_finite = 0

    def run(self, mixture: Mixture, num_steps: int) -> None:
        """Raises AssertionError where any token differs."""
        for step_id in range(num_steps):
            released, admissions = column(*mixture.released()), mixture.admissions()
            for sampler in (self._alone, self._sharing):
                sampler.release(released)
                sampler.admit(admissions)
            drawing = mixture.drawing()
            columns = zip(*((output.row, 0, len(output.tokens)) for output in drawing), strict=True)
            plan = SamplePlan(*(column(*values) for values in columns))
            logits, masks = mixture.logits(len(drawing)).to(self._device), mixture.masks(step_id, drawing)
            expected = self._alone.sample(plan, logits.clone(), masks)
            if self._dealt.takes(plan):
                found = self.shared(plan, logits, masks)
                self.num_dealt += 1
                self.num_not_finite += int((~found.finite).sum())
            else:
                found = self._sharing.sample(plan, logits.clone(), masks)
            assert found.tokens.tolist() == expected.tokens.tolist(), step_id
            assert found.finite.tolist() == expected.finite.tolist(), step_id
            for output, token in zip(drawing, expected.tokens.tolist(), strict=True):
                output.tokens.append(token)

    def shared(self, plan: SamplePlan, logits: torch.Tensor, masks: StepMasks | None) -> SampledTokens:
        """A step as runners take it, with anything in memory that nobody has written."""
        share = self._dealt.share(len(logits))
        room = torch.full((2 * share, VOCAB_SIZE), torch.nan, device=self._device)
        own = self._dealt.begin(plan, logits[:, self._part].contiguous(), room, masks)
        marked = torch.full((share,), 77, device=self._device)
        if own.plan.rows.size:
            drawn = self._sharing.draw(own.plan, own.logits, own.traits)
            marked[: own.plan.rows.size] = self._dealt.marked(*drawn)
        return self._dealt.end(plan, marked)


def check(collectives: Collectives, seed: int) -> Drawing:
    """Draws one mixture. Raises AssertionError where any token differs."""
    drawing = Drawing(collectives)
    with torch.inference_mode():
        drawing.run(Mixture(seed), NUM_STEPS)
    return drawing


def run_rank(seat: Seat, kind: str, num_seeds: int) -> None:
    """One rank; rank 0 prints what was dealt out."""
    collectives = rank_processes.joined(seat, rank_processes.device_of(kind, seat))
    assert collectives is not None
    row_dealer._LEAST_SAVED_BYTES = 1
    runs = [check(collectives, seed) for seed in range(num_seeds)]
    if seat.rank == 0:
        found = {"dealt": sum(run.num_dealt for run in runs), "not_finite": sum(run.num_not_finite for run in runs)}
        print(json.dumps(found), flush=True)


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser()
    rank_processes.add_seat(parser)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seeds", type=int, required=True)
    options = parser.parse_args()
    rank_processes.end_rank(functools.partial(run_rank, options.seat, options.device, options.seeds))


if __name__ == "__main__":
    main()
