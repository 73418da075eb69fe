"""Executes step plans on a CPU: rows in and out, the forward pass, the draw.

Owns the order inside a step, and what a CPU keeps of each row between steps (`CpuBatch`: block
tables and last sampled tokens, one entry per row), from which it makes the model's inputs.
`forward` and `sample` are two calls, because the output layer runs only on tokens that are sampled,
and because what sampling needs may arrive later than what the forward pass needs. A GPU has a
runner of its own (`gpu_runner`), with the same two calls. Does not own sampling parameters
(`row_parameters`) nor the cache itself (`kv_caches`).

    plan -> CpuBatch.build -> model -> hidden states -> Sampler -> tokens, which the next step finds
    in `CpuBatch`
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace_backend.layers.step_metadata import StepMetadata, StepPieces, grouped, of_first_group
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import ForwardPlan, Int32Column, SamplePlan, StepPlan
from headrace_backend.worker.plan_columns import (
    LAST_SAMPLED,
    Entries,
    Int64Column,
    flat_token_ids,
    ranges,
    table_places,
)
from headrace_backend.worker.sampling.dealt_draws import DealtDraws
from headrace_backend.worker.sampling.drafted_draws import DraftedDraws
from headrace_backend.worker.sampling.prompt_logprobs import hidden_indices, prompt_logprobs
from headrace_backend.worker.sampling.sampler import SampledTokens, Sampler
from headrace_backend.worker.speculation.drafter import ComputedTokens
from headrace_backend.worker.speculation.draws import Draws, num_drafts
from headrace_backend.worker.speculation.resolved import resolved
from headrace_backend.worker.speculation.speculation import Speculation
from headrace_backend.worker.step.kv_caches import copy_planned_blocks
from headrace_backend.worker.step.row_states import copy_planned_states
from headrace_backend.worker.step.runner import NOTHING_LAUNCHED, CausalModel, Launched, split_hidden, zero_tokens
from headrace_kernels.attention.paged import AttentionMetadata
from headrace_kernels.finite_rows import finite_rows
from headrace_kernels.speculation.acceptance import Accepted, Drawn, accept_drafts


@dataclasses.dataclass(slots=True)
class ModelInput:
    """What the model computes in one step."""

    # int64 [num_tokens]
    token_ids: torch.Tensor
    # int64 [num_tokens]
    positions: torch.Tensor
    metadata: StepMetadata | StepPieces


class CpuBatch:
    """Turns plans into model inputs."""

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, num_blocks: int, num_groups: int = 1
    ) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        # [num_groups, num_rows, max_blocks] block numbers. Past a row's own blocks, and behind the
        # window of a group that has one, stand old, valid ones.
        self._block_tables: Int32Column = np.zeros((num_groups, num_rows, -(-max_model_len // block_size)), np.int32)
        # [num_rows]
        self._last_tokens: Int64Column = np.zeros(num_rows, np.int64)

    def update_tables(self, plan: ForwardPlan) -> None:
        """Applies the plan's block table updates; before `build`, and before blocks are copied."""
        if plan.table_rows.size:
            places = table_places(plan, self._block_tables.shape, self._last_tokens.size, self._num_blocks)
            self._block_tables.reshape(-1)[places] = plan.table_blocks

    def build(self, plan: ForwardPlan, first_piece: int | None = None, drafts: Int32Column | None = None) -> ModelInput:
        """Makes the inputs of a plan with at least one row.

        Args:
            plan: The plan; its positions are exact.
            first_piece: Tokens of the first of two pieces; None: the step is whole.
            drafts: Number of drafts at the end of each entry; None: nobody drafts.
        """
        ends, entries = np.cumsum(plan.counts, dtype=np.int64), Entries.of(plan)
        return ModelInput(
            token_ids=torch.from_numpy(self._token_ids(plan, ends)),
            positions=torch.from_numpy(ranges(plan.starts, plan.counts)),
            # Layers that read drafts keep states, and steps of models with such layers are whole.
            metadata=self._grouped(entries, drafts) if first_piece is None else self._pieces(plan, first_piece),
        )

    def remember(self, rows: Int32Column, tokens: torch.Tensor) -> None:
        """Notes the tokens just drawn, int64 [num_samples], as their rows' last."""
        self._last_tokens[rows] = tokens.numpy()

    def _token_ids(self, plan: ForwardPlan, ends: Int64Column) -> Int64Column:
        """Ids from the plan, and the last sampled token where the plan does not know it."""
        ids = flat_token_ids(plan, ends).astype(np.int64)
        ids[ids == LAST_SAMPLED] = self._last_tokens[plan.rows[plan.known_counts < plan.counts]]
        return ids

    def _pieces(self, plan: ForwardPlan, first: int) -> StepPieces:
        one, other = Entries.of(plan).cut(first)
        return StepPieces(first, (self._grouped(one), self._grouped(other)))

    def _grouped(self, entries: Entries, drafts: Int32Column | None = None) -> StepMetadata:
        return grouped([self.metadata(entries, group, drafts) for group in range(len(self._block_tables))])

    def metadata(self, entries: Entries, group: int = 0, drafts: Int32Column | None = None) -> AttentionMetadata:
        """What a cache group's layers need of entries whose columns are exact, at least one."""
        block_size, block_tables = self._block_size, self._block_tables[group]
        query_start_loc = np.zeros(entries.counts.size + 1, np.int32)
        np.cumsum(entries.counts, out=query_start_loc[1:])
        positions = ranges(entries.starts, entries.counts)
        seq_lens = entries.seq_lens
        max_seq_len = int(seq_lens.max())
        token_rows = np.repeat(entries.rows, entries.counts)
        blocks = block_tables[token_rows, positions // block_size].astype(np.int64)
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(block_tables[entries.rows, : -(-max_seq_len // block_size)]),
            slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size),
            block_size=block_size,
            max_query_len=int(entries.counts.max()),
            max_seq_len=max_seq_len,
            query_lens_cpu=entries.counts,
            seq_lens_cpu=seq_lens,
            rows=torch.from_numpy(entries.rows.copy()),
            num_drafts=None if drafts is None else torch.from_numpy(drafts),
        )


class CpuRunner:
    """Computes steps, strictly in the order in which they are given."""

    def __init__(
        self,
        model: CausalModel,
        batch: CpuBatch,
        sampler: Sampler,
        kv_caches: list[torch.Tensor],
        speculation: Speculation | None = None,
    ) -> None:
        """Takes its parts.

        Args:
            model: The model.
            batch: Block tables and last tokens.
            sampler: Sampling parameters and the draw.
            kv_caches: Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim]; layers of
                different cache groups may have the same. Of recurrent layers their rows' states.
            speculation: Drafts tokens for steps after this one; None: nobody does.
        """
        self._model = model
        self._batch = batch
        self._sampler = sampler
        self._kv_caches = kv_caches
        self.speculation = speculation
        # None: this rank draws all rows of every step. Those of a worker that drafts are such.
        self._dealt = DealtDraws.of(model.row_dealer, sampler) if speculation is None else None
        # Of the step computed last: its inputs, its plan as rows stand, and its draws.
        self._drafted: tuple[ModelInput, StepPlan, Draws] | None = None
        self.launched = NOTHING_LAUNCHED

    @property
    def draws(self) -> bool:
        """Implements `StepRunner.draws`."""
        return self._model.stage.is_last

    @torch.inference_mode()
    def forward(self, plan: StepPlan, stream: torch.Tensor | None = None) -> torch.Tensor:
        """Implements `Runner.forward`."""
        if self._model.stage.is_last:
            self._sampler.release(plan.released_rows)
            self._sampler.admit(plan.admissions)
            self._sampler.note_forced(plan.forward)
        self._batch.update_tables(plan.forward)
        copy_planned_blocks(plan.forward, self._kv_caches)
        copy_planned_states(plan.forward, self._kv_caches)
        if self.speculation is not None:
            self.speculation.begin(plan)
        if not plan.forward.rows.size:
            assert not plan.sample.rows.size, "samples without a forward pass"
            self.launched = NOTHING_LAUNCHED
            return torch.empty(0, 0)
        if self.speculation is not None:
            return self._forward_drafted(plan, self.speculation)
        return self._forward(plan, self._inputs(plan), stream)

    def _forward_drafted(self, plan: StepPlan, speculation: Speculation) -> torch.Tensor:
        """Computes a plan in which rows go on where they stand, and drafts behind their tokens."""
        exact, draws = resolved(plan, speculation.rows)
        inputs = self._inputs(exact, num_drafts(plan.forward))
        self._drafted = inputs, exact, draws
        hidden = self._forward(exact, inputs)
        computed = ComputedTokens(inputs.token_ids, inputs.positions, of_first_group(inputs.metadata))
        speculation.follow(plan, computed)
        return hidden

    def _inputs(self, plan: StepPlan, drafts: Int32Column | None = None) -> ModelInput:
        first_piece = self._model.first_piece(plan.num_tokens, is_captured=False)
        return self._batch.build(plan.forward, first_piece, drafts)

    def _forward(self, plan: StepPlan, inputs: ModelInput, stream: torch.Tensor | None = None) -> torch.Tensor:
        """What `forward` says, of a plan with rows."""
        self.launched = Launched(plan.num_tokens, captured=False)
        entering = inputs.token_ids if self._model.stage.is_first else self._stream(stream, plan)
        hidden = self._model(entering, inputs.positions, self._kv_caches, inputs.metadata)
        if not self._model.stage.is_last:
            return hidden
        indices = plan.wanted_indices.astype(np.int64)
        if plan.prompt_logprobs.counts.size:
            indices = np.concatenate((indices, hidden_indices(plan.prompt_logprobs)))
        return hidden.index_select(0, torch.from_numpy(indices))

    @torch.inference_mode()
    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens | None:
        """Implements `Runner.sample`."""
        if not self._model.stage.is_last:
            self.remember(plan.sample.rows, zero_tokens(plan, hidden.device))
            return None
        if self.speculation is not None and plan.forward.rows.size:
            return self._sample_drafted(hidden, self.speculation, masks)
        sampled_from, checked, telling = split_hidden(plan, hidden)
        prompts = prompt_logprobs(plan.prompt_logprobs, telling, self._model.logits)
        finite = finite_rows(checked) if len(checked) else None
        if not len(sampled_from):
            return SampledTokens.none(prompts, finite, hidden.device)
        sampled = self._draw(plan.sample, sampled_from, masks)
        self.remember(plan.sample.rows, sampled.tokens)
        sampled.prompts, sampled.checked = prompts, finite
        return sampled

    def _sample_drafted(
        self, hidden: torch.Tensor, speculation: Speculation, masks: StepMasks | None
    ) -> SampledTokens | None:
        """Draws each token of rows that may settle several, and has the next ones drafted."""
        assert self._drafted is not None, "forward comes before sample"
        inputs, plan, draws = self._drafted
        sampled_from, checked, telling = split_hidden(plan, hidden)
        prompts = prompt_logprobs(plan.prompt_logprobs, telling, self._model.logits)
        finite = finite_rows(checked) if len(checked) else None
        if not len(sampled_from):
            return SampledTokens.none(prompts, finite, hidden.device)
        indices, output_positions = (
            torch.from_numpy(column.copy()) for column in (plan.sample.token_indices, plan.sample.output_positions)
        )
        drafted = DraftedDraws(
            draws.counts, draws.firsts, speculation.tokens_per_row, inputs.token_ids, indices, output_positions
        )
        if self._sampler.is_greedy(plan.sample):
            # Rows that want only their most likely token need no logits beyond this rank's own.
            sampled = self._sampler.greedy(*self._model.most_likely(sampled_from))
            accepted = self._accept(plan, inputs, draws, sampled.tokens, sampled.finite, speculation)
        else:
            logits = self._model.logits(sampled_from).float()
            moved = None if masks is None else masks.at(draws.firsts)
            traits = self._sampler.change(plan.sample, logits, drafted, moved)
            tokens, is_finite = self._sampler.draw(plan.sample, logits, traits)
            accepted = self._accept(plan, inputs, draws, tokens, is_finite, speculation)
            sampled = self._sampler.finish(plan.sample, traits, logits, tokens, is_finite, drafted, accepted.counts)
        sampled.prompts, sampled.checked = prompts, finite
        speculation.settle(sampled, accepted, draws, plan.sample.rows[draws.firsts], sampled_from)
        return sampled

    @staticmethod
    def _accept(
        plan: StepPlan,
        inputs: ModelInput,
        draws: Draws,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        speculation: Speculation,
    ) -> Accepted:
        sample = plan.sample
        columns = (sample.token_indices, sample.rows, sample.output_positions)
        hidden_indices, rows, positions = (torch.from_numpy(column.copy()) for column in columns)
        drawn = Drawn(tokens, finite, hidden_indices, rows, positions, inputs.token_ids, inputs.positions)
        firsts, counts = torch.from_numpy(draws.firsts), torch.from_numpy(draws.counts)
        own = speculation.rows
        return accept_drafts(drawn, firsts, counts, own.state, own.tokens_per_row, own.can_stay)

    def remember(self, rows: Int32Column, tokens: torch.Tensor) -> None:
        """Implements `Runner.remember`."""
        self._batch.remember(rows, tokens)

    def reset(self) -> None:
        """Gives back all rows.

        Block tables and last tokens are written anew when a row is taken.
        """
        self._sampler.release_all()
        if self.speculation is not None:
            self.speculation.reset()

    def _stream(self, stream: torch.Tensor | None, plan: StepPlan) -> torch.Tensor:
        if stream is not None:
            return stream
        return torch.zeros(plan.num_tokens, self._model.hidden_size, dtype=self._model.dtype)

    def _draw(self, plan: SamplePlan, hidden: torch.Tensor, masks: StepMasks | None) -> SampledTokens:
        """Rows that want only their most likely token need no logits beyond this rank's own."""
        if self._sampler.is_greedy(plan):
            return self._sampler.greedy(*self._model.most_likely(hidden))
        if self._dealt is not None and self._dealt.takes(plan):
            return self._draw_share(self._dealt, plan, hidden, masks)
        return self._sampler.sample(plan, self._model.logits(hidden), masks)

    def _draw_share(
        self, dealt: DealtDraws, plan: SamplePlan, hidden: torch.Tensor, masks: StepMasks | None
    ) -> SampledTokens:
        """Draws this rank's share of the rows, and gets the other ranks' tokens."""
        share = dealt.share(len(hidden))
        part = torch.empty(len(hidden), self._model.part_size)
        self._model.write_logits(hidden, part)
        own = dealt.begin(plan, part, torch.empty(2 * share, self._model.vocab_size), masks)
        marked = dealt.marked(*self._sampler.draw(own.plan, own.logits, own.traits))
        return dealt.end(plan, torch.nn.functional.pad(marked, (0, share - len(marked))))
