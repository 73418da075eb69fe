"""A worker whose drafts are right with a set probability: what speculation is worth, by itself.

Whether a draft is right is thrown behind the draw, per draft, with the probability that the
request's seed names (`acceptance_seed`); what was drafted and what the model thinks of it do not
matter. So answers mean nothing, and everything else is the real worker: drafting, verification,
settlement, planning. The throw adds a launch of microseconds to a step.

    python -m benchmarks.forced_worker DRAFTER <the worker's own arguments>

`DRAFTER` is `free`, which takes the place of a lookup and proposes the same token always, or
`own`, whichever the worker's configuration names, with its true cost.
"""

# Triton's decorator has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl

from headrace_backend.step.plan import RowAdmission, StepPlan
from headrace_backend.worker.lifetime import end_process
from headrace_backend.worker.main import main as worker
from headrace_backend.worker.speculation.drafter import ComputedTokens, SettledTokens
from headrace_backend.worker.speculation.speculation import RowDrafts, Speculation
from headrace_backend.worker.start_up import drafters
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.step import cpu_runner, gpu_runner
from headrace_kernels.speculation.acceptance import Accepted, Drawn, RowState, accept_drafts

_THROWS = 1 << 16
_POSITION_FACTOR, _ROW_FACTOR = 0x9E3779B1, 0x85EBCA6B
_BLOCK = 256


def acceptance_seed(number: int, acceptance: float) -> int:
    """Seed of a request whose drafts are right with this probability, in thousandths."""
    return number * 1000 + min(round(acceptance * 1000), 999) + 1


class FreeDrafter:
    """Proposes one token for all places, for nothing."""

    wants_hidden = False

    def __init__(self, num_drafts: int, num_rows: int, device: torch.device) -> None:
        """Makes the drafts of all rows, once."""
        self.num_drafts = num_drafts
        self._drafts = torch.ones(num_rows, num_drafts, dtype=torch.int32, device=device)

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Implements `Drafter.admit`."""

    def follow(self, plan: StepPlan, computed: ComputedTokens) -> None:
        """Implements `Drafter.follow`."""

    def propose(self, settled: SettledTokens) -> torch.Tensor:
        """Implements `Drafter.propose`."""
        return self._drafts[: len(settled.rows)]

    def reset(self) -> None:
        """Implements `Drafter.reset`."""


class Throws:
    """Which drafts are right, instead of the comparison with what was drawn."""

    def __init__(self) -> None:
        """Knows no row yet: the device is known with the first worker's rows."""
        self._shares = torch.empty(0)

    def over(self, num_rows: int, device: torch.device) -> None:
        """Takes rows, none of which has an acceptance yet."""
        self._shares = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Notes the acceptance that each row's seed names."""
        for admission in admissions:
            thousandths = (admission.sampling.seed - 1) % 1000
            thousandths = 1000 if thousandths == 999 else thousandths
            self._shares[admission.row].fill_(thousandths * _THROWS // 1000)

    def accept(
        self,
        drawn: Drawn,
        first_draws: torch.Tensor,
        draw_counts: torch.Tensor,
        state: RowState,
        tokens_per_row: int,
        can_stay: bool,
    ) -> Accepted:
        """Takes the place of `accept_drafts`: a right draft is what was drawn, another no token."""
        thrown = self._on_cpu(drawn) if drawn.tokens.device.type == "cpu" else self._on_gpu(drawn)
        return accept_drafts(thrown, first_draws, draw_counts, state, tokens_per_row, can_stay)

    def _on_cpu(self, drawn: Drawn) -> Drawn:
        positions = drawn.step_positions[drawn.hidden_indices.long()]
        rows = drawn.rows.long()
        right = _scattered(positions * _POSITION_FACTOR + rows * _ROW_FACTOR) % _THROWS < self._shares[rows]
        drafts = torch.nn.functional.pad(torch.where(right, drawn.tokens, -1), (1, 0))
        places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        return drawn._replace(hidden_indices=places, step_token_ids=drafts, step_positions=positions)

    def _on_gpu(self, drawn: Drawn) -> Drawn:
        """One launch, which a step hardly notices."""
        count = len(drawn.tokens)
        places, drafts = torch.empty_like(drawn.hidden_indices), drawn.tokens.new_empty(count + 1)
        positions = torch.empty_like(drawn.tokens)
        given = (drawn.tokens, drawn.hidden_indices, drawn.step_positions, drawn.rows, self._shares)
        throw_kernel[(triton.cdiv(count, _BLOCK),)](*given, places, drafts, positions, count, _THROWS, _BLOCK)
        return drawn._replace(hidden_indices=places, step_token_ids=drafts, step_positions=positions)


@triton.jit(do_not_specialize=["count"])
def throw_kernel(
    tokens, hidden_indices, step_positions, rows, shares, places, drafts, positions, count, THROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of draws): what `Throws._on_cpu` says."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    position = tl.load(step_positions + tl.load(hidden_indices + offs, mask=mask, other=0), mask=mask, other=0)
    row = tl.load(rows + offs, mask=mask, other=0).to(tl.int64)
    value = position.to(tl.int64) * 0x9E3779B1 + row * 0x85EBCA6B
    for _ in tl.static_range(2):
        value = value & 0xFFFFFFFF
        value = (value ^ (value >> 16)) * 0x45D9F3B
    value = value & 0xFFFFFFFF
    value = value ^ (value >> 16)
    right = value % THROWS < tl.load(shares + row, mask=mask, other=0)
    tl.store(drafts + 1 + offs, tl.where(right, tl.load(tokens + offs, mask=mask, other=0), -1), mask=mask)
    tl.store(places + offs, offs, mask=mask)
    tl.store(positions + offs, position, mask=mask)


def _scattered(values: torch.Tensor) -> torch.Tensor:
    """Numbers below 2^32 that look like chance, of int64 ones."""
    for _ in range(2):
        values = values & 0xFFFFFFFF
        values = (values ^ (values >> 16)) * 0x45D9F3B
    values = values & 0xFFFFFFFF
    return values ^ (values >> 16)


def install(drafter: str) -> None:
    """Replaces what the worker compares drafts with, and the drafter if it is to be free."""
    throws = Throws()
    cpu_runner.accept_drafts = throws.accept  # type: ignore[attr-defined]
    gpu_runner.accept_drafts = throws.accept  # type: ignore[attr-defined]
    join, begin = Speculation.__init__, Speculation.begin

    def joined(self: Speculation, *args: Any, **kwargs: Any) -> None:
        join(self, *args, **kwargs)
        throws.over(self.rows.last_tokens.shape[0], self.rows.last_tokens.device)

    def begun(self: Speculation, plan: StepPlan) -> None:
        throws.admit(plan.admissions)
        begin(self, plan)

    Speculation.__init__, Speculation.begin = joined, begun  # type: ignore[method-assign]
    if drafter == "free":
        drafters.lookup_drafter = _free_drafter


def _free_drafter(sizes: WorkerSizes, rows: RowDrafts) -> FreeDrafter:
    return FreeDrafter(rows.tokens_per_row - 1, sizes.max_num_seqs, rows.drafts.device)


if __name__ == "__main__":
    install(sys.argv[1])
    end_process(worker(sys.argv[2:]))
