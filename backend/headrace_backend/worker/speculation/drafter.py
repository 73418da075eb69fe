"""What proposes the next tokens of rows, as the runners ask it.

Owns the interfaces and the record that is handed over. A drafter is asked for the drafts of a step
on the device, before any host has read what the step before drew: behind the draw of that step
(`Drafter`), or at the head of the one that computes the drafts (`HeadDrafter`), whose plan has
blocks for their keys and values. Whether a draft was right is none of its business: the step draws
at each drafted position what it would have drawn without drafts, and keeps what is equal
(`acceptance`). So a drafter can't change an answer, only how many steps it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from headrace_backend.layers.step_metadata import StepMetadata, StepPieces
from headrace_backend.step.plan import Int32Column, RowAdmission, StepPlan
from headrace_backend.weights.progress import Progress
from headrace_backend.worker.speculation.drafted_rows import DraftedRows


class ComputedTokens(NamedTuple):
    """What one step's forward pass computed."""

    # int64 [num_tokens] as computed, drafts included; on a GPU behind those of the plan is the
    # padding of the step's shape.
    token_ids: torch.Tensor
    # int64 [num_tokens], exact.
    positions: torch.Tensor
    # What attention read: slots and block tables too.
    metadata: StepMetadata | StepPieces
    # Key of the graph that computed them, which leaves the others where it always does; None: it
    # was launched kernel by kernel.
    graph: Hashable | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SettledTokens:
    """What one step settled, on the device: an entry for each sample of the plan, without padding.

    A sample is a row that draws: one that decodes, one whose prompt has just ended, or another
    output of the same request (a fork), which draws from a prompt that a leader's row computed.
    """

    # int32 [num_samples] the rows, and the same numbers on the host.
    rows: torch.Tensor
    rows_on_host: Int32Column
    # int64 [num_samples] places of the first settled token in the rows' sequences, prompt included.
    # The row's cache holds all tokens before it, and behind it what the step drafted.
    positions: torch.Tensor
    # int64 [num_samples, tokens_per_row] settled tokens of each row; behind `counts` of them stands
    # any valid id. The last settled one is the row's last token, and is not computed yet.
    tokens: torch.Tensor
    # int32 [num_samples] up to tokens_per_row; 0: the row has the last token that it had.
    counts: torch.Tensor
    # int32 [num_samples] positions, within their outputs, of the tokens that the next step draws
    # first: with the row's seed and output they key the noise of the draw.
    output_positions: torch.Tensor
    # Most drafts of a row that the next step verifies: nobody looks at any behind them, or at any
    # if it is 0.
    num_wanted: int
    # [num_samples, tokens_per_row, hidden_size] final hidden states that the tokens were drawn
    # from; None where the drafter does not want them.
    hidden: torch.Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens. Of several ranks each has one, and all propose the same."""

    # Tokens that it proposes for each row.
    num_drafts: int
    # Whether `SettledTokens.hidden` is needed.
    wants_hidden: bool

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Takes new rows, before the step that computes their first tokens.

        Rows that were given back are forgotten by being taken again.
        """

    def follow(self, plan: StepPlan, computed: ComputedTokens) -> None:
        """Sees what a step's forward pass computed, behind it and before the draw.

        Args:
            plan: The step's plan, whose blocks were copied already. Its positions of rows that
                decode are upper bounds.
            computed: The tokens that were computed.
        """

    def propose(self, settled: SettledTokens) -> torch.Tensor:
        """Proposes what follows the settled tokens. Launches work, and waits for nothing.

        Returns:
            int32 or int64 [num_samples, num_drafts]: valid ids of the vocabulary everywhere. Where
            it has nothing to propose any id will do: one that is drawn all the same is right.

        Raises:
            Exception: Whatever it is, the rows have no drafts in the next step, or wrong ones, and
                nothing else is lost.
        """

    def reset(self) -> None:
        """Forgets all rows."""


@runtime_checkable
class HeadDrafter(Protocol):
    """Proposes tokens at the head of the step that computes them.

    Of several ranks each has one, and all propose the same.
    """

    # Most tokens that it proposes for each row.
    num_drafts: int

    def begin(self, plan: StepPlan) -> None:
        """Takes a step's plan before anything of it is computed, and before `draft`.

        Args:
            plan: The step's plan, with or without tokens to compute. Block tables are up to date,
                and its blocks were copied in the model's own caches.
        """

    def draft(self, drafted: DraftedRows) -> torch.Tensor:
        """Proposes what follows the rows' last tokens. Launches work, and waits for nothing.

        Returns:
            int32 or int64 [num_rows, num_drafts]: valid ids of the vocabulary everywhere.

        Raises:
            Exception: As of `Drafter.propose`.
        """

    def follow(self, plan: StepPlan, computed: ComputedTokens) -> None:
        """Sees what a step's forward pass computed: `Drafter.follow`."""


@runtime_checkable
class CapturesPasses(Protocol):
    """A drafter that replays what it launches from graphs."""

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""

    def capture(
        self, progress: Progress, steps: Mapping[Hashable, ComputedTokens], pad: Callable[[Hashable], None]
    ) -> None:
        """Captures them.

        Args:
            progress: Called with (phase, done, total, unit).
            steps: What the model's graphs of decodes compute, by their keys. They share memory.
            pad: Makes that memory what a step of one key is in which nothing takes part.
        """
