"""Interfaces for which a CPU's parts and a GPU's stand in for one another.

Owns the interfaces: a model, as runners call it, and a runner, as start-up and the step loop call
it; and how plans that answer no request are run, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from headrace_backend.layers.step_metadata import StepMetadata, StepPieces
from headrace_backend.parallel.row_dealer import RowDealer
from headrace_backend.pp_rules import Stage
from headrace_backend.step.masks import StepMasks, open_masks
from headrace_backend.step.plan import Int32Column, StepPlan
from headrace_backend.weights.progress import Progress
from headrace_backend.worker.sampling.sampler import SampledTokens
from headrace_backend.worker.speculation.speculation import Speculation


class CausalModel(Protocol):
    """What a runner needs of a model, or of a stage of one (see `headrace_backend.models`)."""

    vocab_size: int
    hidden_size: int
    # Of activations.
    dtype: torch.dtype
    stage: Stage
    # Deals the rows that a step draws out to ranks; None: there are no others, or no draws here.
    row_dealer: RowDealer | None

    def __call__(
        self,
        entering: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: StepMetadata | StepPieces,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes hidden states [num_tokens, hidden_size], or only those with indices `wanted`.

        What enters are token ids, int64 [num_tokens] as their positions are, or behind the first
        stage the residual stream [num_tokens, hidden_size]. Before the last stage the stream of all
        tokens is computed.
        """

    def representative_layers(self) -> contextlib.AbstractContextManager[None]:
        """Has steps take some layers alone while entered, which launch every kernel that all do."""

    def first_piece(self, num_tokens: int, is_captured: bool) -> int | None:
        """Tokens of the first of two pieces in which it takes a step; None: whole."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_samples, vocab_size] from [num_samples, hidden_size].

        float32, on a GPU also the model's type.
        """

    @property
    def part_size(self) -> int:
        """Tokens of this rank's part of the vocabulary, of which it computes logits itself."""

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Logits of this rank's part of the vocabulary.

        From [n, hidden_size], to [n, part_size] fp32.

        Can be captured: it sends nothing to other ranks.
        """

    def gather_logits(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Puts all ranks' parts side by side, to [n, vocab_size] fp32.

        Of one rank, whose part is `out` already, nothing is to be done.
        """

    def most_likely(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the most likely tokens, int64 [n], and which rows are finite, bool [n]."""


class Launched(NamedTuple):
    """How a step was launched."""

    # Tokens that the device computes, padding included.
    num_tokens: int
    # Whether its forward pass was replayed from a graph.
    captured: bool


NOTHING_LAUNCHED = Launched(0, False)


class StepRunner(Protocol):
    """Computes steps in the order in which they are given, as the step loop asks for them."""

    @property
    def launched(self) -> Launched:
        """How the last `forward` was launched."""

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Takes and gives back rows, then computes the plan's tokens: `Runner.forward`."""

    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens | None:
        """Draws the plan's tokens from what `forward` returned: `Runner.sample`."""

    @property
    def draws(self) -> bool:
        """Whether this rank draws tokens: those of the last pipeline stage do."""

    def reset(self) -> None:
        """Gives back all rows, whatever a step that raised has left of them.

        The next plan finds an empty batch.
        """


class Runner(StepRunner, Protocol):
    """Computes steps, or one stage's part of them, on one device (`cpu_runner`, `gpu_runner`)."""

    # Who drafts tokens for later steps; None: nobody does.
    speculation: Speculation | None

    def forward(self, plan: StepPlan, stream: torch.Tensor | None = None) -> torch.Tensor:
        """Takes and gives back rows, then computes the plan's tokens.

        Args:
            plan: The step.
            stream: [num_tokens, hidden_size] what the stage before returned, which may be changed;
                behind the first stage None means zeros, for steps that answer no request.

        Returns:
            Hidden states of the sampled tokens, of those that are checked and of those that report
            prompts, [num_samples + num_checked + num_prompt_tokens, hidden_size]; see
            `split_hidden`. Before the last stage the residual stream of all tokens, [num_tokens,
            hidden_size], which nobody else changes.
        """

    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens | None:
        """Draws the plan's tokens from what `forward` returned, checks it, and reports prompts.

        Args:
            plan: The step, as `forward` was given it.
            hidden: What `forward` returned.
            masks: The step's masks, where the plan says that some follow it.

        Returns:
            None if there is nothing of these to do. Before the last stage there never is: rows
            remember zeros, in place of tokens that the last stage draws.
        """

    def remember(self, rows: Int32Column, tokens: torch.Tensor) -> None:
        """Notes the tokens just drawn, int64 [num_samples], as their rows' last."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """A runner that replays its steps from graphs (`gpu_runner`)."""

    @property
    def num_captured(self) -> int:
        """Graphs captured so far, whether or not they were kept."""

    @property
    def captured_mixed_sizes(self) -> tuple[int, ...]:
        """Tokens of the kept shapes of steps with prompts, ascending."""

    @property
    def drafted_graphs(self) -> tuple[tuple[int, float], ...]:
        """Tokens and microseconds of the kept shapes of decodes with drafts, ascending."""

    def capture(self, progress: Progress) -> None:
        """Captures them; the cache is there already."""


def split_hidden(plan: StepPlan, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The three parts of what `Runner.forward` gave: sampled, checked, reporting prompts."""
    num_samples, num_checked = plan.sample.rows.size, plan.forward.checked_indices.size
    return hidden.tensor_split((num_samples, num_samples + num_checked))


def zero_tokens(plan: StepPlan, device: torch.device) -> torch.Tensor:
    """What stands for the tokens of a step that another stage draws, or does not draw."""
    return torch.zeros(plan.sample.rows.size, dtype=torch.int64, device=device)


def run_steps(
    runner: StepRunner, plans: Sequence[StepPlan], on_step: Callable[[int], None], vocab_size: int = 0
) -> None:
    """Runs plans one after the other and waits for what the last one drew.

    Args:
        runner: Takes the plans.
        plans: At least one.
        on_step: Called with the number of plans launched, before each and after the last.
        vocab_size: Gives rows with a mask one that allows every token; 0: they draw without.
    """
    sampled = None
    for done, plan in enumerate(plans):
        on_step(done)
        masks = open_masks(plan, vocab_size) if plan.num_masked and vocab_size else None
        drawn = runner.sample(plan, runner.forward(plan), masks)
        sampled = sampled if drawn is None else drawn
    if sampled is not None:
        sampled.tokens.cpu()
    on_step(len(plans))
