"""From logits to tokens: who gets which treatment.

Owns the order: changes to single logits, penalties, masks, then the choice
(`headrace_kernels.sampling.choice`), log probabilities of the changed logits, and the notes that
later steps of the row need. Rows that need none of it cost an argmax. Does not own logits (the
runners) nor any decision about when an output ends.

    logits -> change     in place, of rows that ask for it
           -> draw_all   every row, one way
           -> finish     notes and log probabilities, of rows that ask for them

On a GPU nothing here waits for the device: what the host must know of a row, its traits, it knows
since the row's admission. The draw in the middle launches the same kernels whatever rows ask for,
so that it can be captured in a graph, and no row takes the others' draw off it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import ForwardPlan, Int32Column, RowAdmission, SamplePlan, StepResult, UInt8Column
from headrace_backend.worker.device_copies import EarlyCopies, copy_to_device, indices_on_device
from headrace_backend.worker.sampling.drafted_draws import DraftedDraws
from headrace_backend.worker.sampling.logit_changes import LogitChanges
from headrace_backend.worker.sampling.penalty_slots import PenaltySlots
from headrace_backend.worker.sampling.prompt_logprobs import PromptLogprobs
from headrace_backend.worker.sampling.row_parameters import RowParameters, Trait
from headrace_kernels.sampling.choice import choose_greedy, sample_rows
from headrace_kernels.sampling.logprobs import TokenLogprobs, token_logprobs
from headrace_kernels.sampling.token_masks import mask_rows
from headrace_kernels.triton_runtime import uses_triton

Indices = npt.NDArray[np.int64]

_CHANGED = Trait.CHANGED_LOGITS | Trait.PENALIZED


@dataclasses.dataclass(slots=True)
class SampledLogprobs:
    """Log probabilities of those samples whose rows asked for them."""

    # Which samples, and how many top tokens each reports.
    samples: Indices
    num_top: Int32Column
    values: TokenLogprobs


@dataclasses.dataclass(slots=True)
class SampledTokens:
    """What a step drew, and its prompt logprobs, still on the device.

    There is a draw for each sample of the plan, or several where a row has drafts.
    """

    # int64 [num_draws]; 0 where the row is not finite.
    tokens: torch.Tensor
    # bool [num_draws]
    finite: torch.Tensor
    logprobs: SampledLogprobs | None
    prompts: PromptLogprobs | None = None
    # bool [num_checked] whether the hidden states that the plan has checked are finite; None: none.
    checked: torch.Tensor | None = None
    # int32 [num_samples] how many of its draws each sample settled, and on the host how many draws
    # it has; None: one each.
    counts: torch.Tensor | None = None
    draw_counts: Int32Column | None = None
    # int32 [1] drafts that were lost so far; None: the worker drafts none.
    num_lost_drafts: torch.Tensor | None = None

    @classmethod
    def none(
        cls, prompts: PromptLogprobs | None, checked: torch.Tensor | None, device: torch.device
    ) -> SampledTokens | None:
        """Result of a step without draws; None if it has neither prompt logprobs nor checks."""
        if prompts is None and checked is None:
            return None
        tokens = torch.empty(0, dtype=torch.int64, device=device)
        return cls(tokens, tokens.bool(), None, prompts, checked)

    def fill(self, result: StepResult) -> None:
        """Waits for the device and writes the columns of a result."""
        result.tokens = self.tokens.to(torch.int32).cpu().numpy()
        result.ok = self.finite.to(torch.uint8).cpu().numpy()
        settled = self._settled(result)
        if self.logprobs is not None:
            _fill_logprobs(result, self.logprobs, settled)
        if settled is not None:
            result.tokens, result.ok = result.tokens[settled], result.ok[settled]
        if self.num_lost_drafts is not None:
            result.lost_drafts = int(self.num_lost_drafts)
        if self.prompts is not None:
            self.prompts.fill(result)
        if self.checked is not None:
            result.checked_ok = self.checked.to(torch.uint8).cpu().numpy()

    def _settled(self, result: StepResult) -> npt.NDArray[np.bool_] | None:
        """Writes the counts of a result; whether each draw is settled, None: all are."""
        if self.counts is None or self.draw_counts is None:
            return None
        result.counts = self.counts.to(torch.int32).cpu().numpy()
        firsts = np.cumsum(self.draw_counts) - self.draw_counts
        depths = np.arange(self.draw_counts.sum()) - np.repeat(firsts, self.draw_counts)
        settled: npt.NDArray[np.bool_] = depths < np.repeat(result.counts, self.draw_counts)
        return settled


class Sampler:
    """Parameters and counts of all rows, and the draw."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._parameters = RowParameters(num_rows, vocab_size, device)
        self._changes = LogitChanges(device)
        self._penalties = PenaltySlots(vocab_size, device)
        # Masks of many rows are megabytes, and come while the forward pass is computed.
        self._copies = EarlyCopies(device)

    def release(self, rows: Int32Column) -> None:
        """Forgets rows whose sequence left."""
        for row in rows.tolist():
            self._changes.release(row)
            self._penalties.release(row)

    def release_all(self) -> None:
        """Forgets all rows."""
        self.release(np.arange(self._num_rows, dtype=np.int32))

    def admit(self, admissions: list[RowAdmission]) -> None:
        """Takes new sequences in free rows."""
        if not admissions:
            return
        self._parameters.admit(admissions)
        for admission in admissions:
            traits = self._parameters.traits[admission.row]
            if traits & Trait.CHANGED_LOGITS:
                self._changes.admit(admission)
            if traits & Trait.PENALIZED:
                self._penalties.admit(admission)

    def note_forced(self, plan: ForwardPlan) -> None:
        """Notes output that nobody drew for rows whose draws depend on what they drew.

        Rows with bad words have none.
        """
        for row, _, ids in plan.forced_tokens():
            if self._parameters.traits[row] & Trait.PENALIZED:
                self._penalties.count_known(row, ids)

    def is_greedy(self, plan: SamplePlan) -> bool:
        """Whether the plan's rows all want their most likely token, and nothing else."""
        return not np.bitwise_or.reduce(self._parameters.traits[plan.rows])

    def reports_logprobs(self, plan: SamplePlan) -> bool:
        """Whether any of the plan's rows reports log probabilities."""
        return bool(np.bitwise_or.reduce(self._parameters.traits[plan.rows], initial=0) & Trait.LOGPROBS)

    def are_greedy(self, rows: Int32Column) -> bool:
        """Whether none of the rows draws at random."""
        return not np.bitwise_or.reduce(self._parameters.traits[rows]) & Trait.RANDOM

    @staticmethod
    def greedy(tokens: torch.Tensor, finite: torch.Tensor) -> SampledTokens:
        """What a greedy plan draws.

        Args:
            tokens: int64 [num_samples], the most likely ones; changed in place.
            finite: bool [num_samples].
        """
        return SampledTokens(tokens.masked_fill_(~finite, 0), finite, None)

    def draw_all(
        self, logits: torch.Tensor, rows: torch.Tensor, output_positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws one token per sample from logits that `change` has seen.

        Can be captured in a CUDA graph: parameters are read when it runs.

        Args:
            logits: bf16, fp16 or fp32 [num_samples, vocab_size].
            rows: int32 [num_samples] on the device; num_rows, which is greedy, for padding.
            output_positions: int32 [num_samples] on the device.

        Returns:
            Tokens, int64 [num_samples], 0 where the row is not finite; whether it is finite, bool
            [num_samples].
        """
        return sample_rows(logits, rows, output_positions, self._parameters.matrix)

    def draw(self, plan: SamplePlan, logits: torch.Tensor, traits: UInt8Column) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws one token per sample from logits that `change` has seen, outside of graphs.

        Args:
            plan: Rows and exact positions, num_samples of each.
            logits: float32 [num_samples, vocab_size].
            traits: What `change` gave.

        Returns:
            What `draw_all` does.
        """
        if np.bitwise_or.reduce(traits) & Trait.RANDOM or uses_triton(logits):
            rows, positions = copy_to_device(np.stack((plan.rows, plan.output_positions)), self._device)
            return self.draw_all(logits, rows, positions)
        tokens, finite = choose_greedy(logits)
        return tokens.masked_fill_(~finite, 0), finite

    def sample(self, plan: SamplePlan, logits: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens:
        """Draws one token per sample, whatever its row needs.

        Args:
            plan: Rows and positions, num_samples of each.
            logits: [num_samples, vocab_size]. May be changed in place.
            masks: The step's masks; None: no row of the plan has one.
        """
        logits = logits.float()
        traits = self.change(plan, logits, masks=masks)
        return self.finish(plan, traits, logits, *self.draw(plan, logits, traits))

    def change(
        self,
        plan: SamplePlan,
        logits: torch.Tensor,
        drafted: DraftedDraws | None = None,
        masks: StepMasks | None = None,
    ) -> UInt8Column:
        """Launches what changes the logits of rows that ask for it: bias, bans, penalties, masks.

        Of plans without such rows it launches nothing. Masks come to the worker after the forward
        pass was launched, and whatever else decides which tokens a row may draw belongs here too.

        Args:
            plan: Rows and positions, num_samples of each; with drafts a sample for each draw.
            logits: float32 [num_samples, vocab_size], changed in place.
            drafted: What draws of a worker that drafts depend on.
            masks: The step's masks; None: no row of the plan has one.

        Returns:
            The traits of each sample's row, for `finish`.
        """
        traits: UInt8Column = self._parameters.traits[plan.rows]
        if np.bitwise_or.reduce(traits, initial=0) & _CHANGED:
            self._change(plan, traits, logits, drafted)
        if masks is not None and masks.samples.size:
            words, samples = self._copies.copy(masks.masks, masks.samples)
            mask_rows(logits, samples, words.view(masks.masks.shape))
        return traits

    def finish(
        self,
        plan: SamplePlan,
        traits: UInt8Column,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        drafted: DraftedDraws | None = None,
        counts: torch.Tensor | None = None,
    ) -> SampledTokens:
        """Launches what follows a draw: notes for rows' next draws, log probabilities.

        Args:
            plan: The step's sample plan, as `change` was given it.
            traits: What `change` gave.
            logits: Logits that the tokens were drawn from.
            tokens: int64 [num_samples], drawn.
            finite: bool [num_samples].
            drafted: What `change` was given.
            counts: int32, how many draws of each of its samples are settled.
        """
        present = int(np.bitwise_or.reduce(traits, initial=0))
        if present & _CHANGED:
            if drafted is None or counts is None:
                self._note(plan, traits, tokens)
            else:
                self._note_settled(plan, traits, tokens, drafted, counts)
        logprobs = self._logprobs(plan, traits, logits, tokens) if present & Trait.LOGPROBS else None
        return SampledTokens(tokens, finite, logprobs)

    def note(self, plan: SamplePlan, tokens: torch.Tensor) -> None:
        """Keeps what the rows' next draws depend on, as `finish` does.

        Args:
            plan: Rows and positions, num_samples of each.
            tokens: int64 [num_samples], drawn.
        """
        traits: UInt8Column = self._parameters.traits[plan.rows]
        if np.bitwise_or.reduce(traits, initial=0) & _CHANGED:
            self._note(plan, traits, tokens)

    def _change(
        self, plan: SamplePlan, traits: UInt8Column, logits: torch.Tensor, drafted: DraftedDraws | None
    ) -> None:
        changed = np.flatnonzero(traits & Trait.CHANGED_LOGITS)
        samples, rows = changed.tolist(), plan.rows[changed].tolist()
        positions = plan.output_positions[changed].tolist()
        if drafted is None:
            self._changes.apply(logits, samples, rows, positions)
            self._changes.ban_words(logits, samples, rows)
        else:
            self._changes.apply(logits, samples, rows, positions, drafted.output_positions)
            self._changes.ban_drafted_words(logits, plan.rows, drafted)
        penalized = np.flatnonzero(traits & Trait.PENALIZED)
        if penalized.size:
            drafts = None if drafted is None else drafted.drafts_before(penalized)
            self._penalties.apply(logits, penalized, plan.rows[penalized], self._parameters.matrix, drafts)

    def _note(self, plan: SamplePlan, traits: UInt8Column, tokens: torch.Tensor) -> None:
        """Keeps what the rows' next draws depend on."""
        changed = np.flatnonzero(traits & Trait.CHANGED_LOGITS)
        self._changes.append(changed.tolist(), plan.rows[changed].tolist(), tokens)
        penalized = np.flatnonzero(traits & Trait.PENALIZED)
        if penalized.size:
            self._penalties.count(plan.rows[penalized], tokens[self._to_device(penalized)])

    def _note_settled(
        self,
        plan: SamplePlan,
        traits: UInt8Column,
        tokens: torch.Tensor,
        drafted: DraftedDraws,
        counts: torch.Tensor,
    ) -> None:
        """Does what `_note` does, of settled draws alone."""
        self._changes.append_settled(plan.rows, drafted, tokens, counts)
        penalized = np.flatnonzero(traits & Trait.PENALIZED)
        if penalized.size:
            settled = drafted.settled(penalized, counts)
            self._penalties.count_settled(plan.rows[penalized], tokens[self._to_device(penalized)], settled)

    def _logprobs(
        self, plan: SamplePlan, traits: UInt8Column, logits: torch.Tensor, tokens: torch.Tensor
    ) -> SampledLogprobs:
        samples = np.flatnonzero(traits & Trait.LOGPROBS)
        num_top = np.minimum(self._parameters.num_logprobs[plan.rows[samples]], logits.shape[1])
        chosen = self._to_device(samples)
        return SampledLogprobs(samples, num_top, token_logprobs(logits[chosen], tokens[chosen], int(num_top.max())))

    def _to_device(self, column: npt.NDArray[np.integer]) -> torch.Tensor:
        return indices_on_device(column, self._device)


def _fill_logprobs(result: StepResult, logprobs: SampledLogprobs, settled: npt.NDArray[np.bool_] | None) -> None:
    """Writes the log probability columns of settled draws; the result has all draws yet.

    A sample that is not finite has -inf, rank 0 and no top tokens; banned tokens are no top tokens.
    """
    kept = slice(None) if settled is None else settled[logprobs.samples]
    draws = logprobs.samples[kept]
    finite = result.ok[draws].astype(bool)
    top = logprobs.values.top.cpu().numpy()[kept]
    reported = (np.arange(top.shape[1]) < logprobs.num_top[kept, None]) & np.isfinite(top) & finite[:, None]
    places = draws if settled is None else (np.cumsum(settled) - 1)[draws]
    result.logprob_indices = places.astype(np.int32)
    result.logprob_sampled = np.where(finite, logprobs.values.sampled.cpu().numpy()[kept], -np.inf).astype(np.float32)
    result.logprob_ranks = np.where(finite, logprobs.values.ranks.cpu().numpy()[kept], 0).astype(np.int32)
    result.logprob_counts = reported.sum(axis=1).astype(np.int32)
    result.top_token_ids = logprobs.values.top_ids.cpu().numpy()[kept][reported].astype(np.int32)
    result.top_logprobs = top[reported].astype(np.float32)
