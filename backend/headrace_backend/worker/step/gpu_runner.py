"""Executes step plans on a GPU: columns up, kernels launched, nothing waited for.

Owns the order inside a step, and whether it is replayed or launched kernel by kernel. A step that
fits a captured shape is padded to it and replayed as two graphs, the forward pass and the draw; any
other, one whose contexts are to be gathered, and one with prompt logprobs, is launched as it is.
Both run the same code (`_forward`, `_draw`, `_draw_share`) on the same buffers, so a graph is a
recording and never a variant.

    plan -> StepBuffers.upload (one copy) -> _forward -> logits -> ... -> _draw -> tokens,
                                                         which the next step finds in `DeviceRows`

Between the two graphs is what must not be captured, because few steps need it or because it waits
for others: ranks put their logits together or deal the rows out, and rows with bias, bans or
penalties have theirs changed. Behind the draw come notes and log probabilities of rows that ask for
them, and where each rank has drawn a share of the rows, the others' tokens. None of it takes the
other rows off their graphs.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch

from headrace_backend.layers.step_metadata import of_first_group
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import Int32Column, SamplePlan, StepPlan
from headrace_backend.weights.progress import Progress
from headrace_backend.worker.device_copies import copy_to_device, indices_on_device
from headrace_backend.worker.sampling.dealt_draws import DealtDraws
from headrace_backend.worker.sampling.drafted_draws import DraftedDraws
from headrace_backend.worker.sampling.prompt_logprobs import hidden_indices, prompt_logprobs
from headrace_backend.worker.sampling.sampler import SampledTokens, Sampler
from headrace_backend.worker.speculation.drafter import ComputedTokens
from headrace_backend.worker.speculation.draws import Draws, widened
from headrace_backend.worker.speculation.speculation import Speculation
from headrace_backend.worker.step.buffers import DeviceRows, Gathers, StepBuffers, StepInputs, StepLimits
from headrace_backend.worker.step.graphs import StepGraphs
from headrace_backend.worker.step.kv_caches import copy_planned_blocks
from headrace_backend.worker.step.row_states import block_caches, copy_planned_states, one_of_each
from headrace_backend.worker.step.runner import NOTHING_LAUNCHED, CausalModel, Launched, split_hidden, zero_tokens
from headrace_backend.worker.step.shape import AttentionSizes, StepShape, smallest_holding, undominated, widest
from headrace_kernels.finite_rows import finite_rows
from headrace_kernels.speculation.acceptance import Accepted, Drawn, accept_drafts
from headrace_kernels.step_inputs import store_last_tokens

# Shapes of up to this many tokens are kept untimed: theirs is the reading of the weights, whatever
# is padded.
_TIMED_FROM_TOKENS = 129
# The last layer's products over sampled tokens alone are of a multiple of so many rows, which
# warm-up has run: fewer would take kernels that steps of so many tokens never take.
_LAST_ROWS = 128
# Most memory for contexts that are gathered before attention: 131,072 tokens of an 8-head, 128-wide
# layer.
_GATHER_BYTES = 512 << 20


class _Piece(enum.Enum):
    """What is captured of a step."""

    FORWARD = enum.auto()
    DRAW = enum.auto()
    # In place of the draw, where rows are dealt out to ranks.
    SHARE_DRAW = enum.auto()


# Of a draw: tokens, whether each is finite, and in workers that draft what is settled.
_Draw: TypeAlias = tuple[torch.Tensor, torch.Tensor, Accepted | None]


def _computed(inputs: StepInputs, graph: StepShape | None = None) -> ComputedTokens:
    """What a step of these inputs computes, for a drafter."""
    return ComputedTokens(inputs.token_ids, inputs.positions, of_first_group(inputs.attention), graph)


class GpuRunner:
    """Computes steps, strictly in the order in which they are given."""

    def __init__(
        self,
        model: CausalModel,
        sampler: Sampler,
        kv_caches: list[torch.Tensor],
        limits: StepLimits,
        sizes: AttentionSizes,
        shapes: Sequence[StepShape] = (),
        agreed_times: Callable[[list[float]], list[float]] = list,
        speculation: Speculation | None = None,
        rows: DeviceRows | None = None,
    ) -> None:
        """Allocates what is shared by all steps.

        Args:
            model: The model.
            sampler: Sampling parameters and the draw.
            kv_caches: Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim]; layers of
                different cache groups may have the same. Of recurrent layers their rows' states.
            limits: Limits of a step.
            sizes: Sizes of a layer's attention.
            shapes: What `capture` captures, smallest first. It keeps those that no larger one makes
                useless.
            agreed_times: Makes of this rank's times those by which all ranks decide, so that all
                keep the same shapes.
            speculation: Drafts tokens for steps after this one; None: nobody does.
            rows: The rows' block tables, where a drafter has them too; None: made here.
        """
        self._model = model
        self._sampler = sampler
        self.kv_caches = kv_caches
        blocks = block_caches(kv_caches)[0]
        self._device = blocks.device
        num_blocks, _, _, block_size, _ = blocks.shape
        self._sizes = sizes
        max_blocks = -(-limits.max_model_len // block_size)
        self._rows = rows or DeviceRows(limits.max_num_seqs, max_blocks, num_blocks, self._device, limits.num_groups)
        about_model = (model.dtype, model.hidden_size, (model.part_size, model.vocab_size))
        self._buffers = StepBuffers(limits, sizes, one_of_each(kv_caches), *about_model, _GATHER_BYTES, model.stage)
        # None: this rank draws all rows of every step. Those of a worker that drafts are such.
        self._dealt = DealtDraws.of(model.row_dealer, sampler) if speculation is None else None
        self._shapes = tuple(shapes)
        self._agreed_times = agreed_times
        self._graphs = StepGraphs(self._device) if self._device.type == "cuda" else None
        # The shape of the step launched last, for `sample`, and whether it is one of `shapes`.
        self._shape: StepShape | None = None
        self._is_padded = False
        self._gathers: Gathers = ()
        self.speculation = speculation
        # In a worker that drafts, of the step launched last: its plan with a sample for each draw,
        # and which of them belong together; and what steps compute, by captured shape.
        self._drawn: tuple[StepPlan, Draws] | None = None
        self._inputs: StepInputs | None = None
        self._captured_tokens: dict[StepShape, ComputedTokens] = {}
        # Milliseconds of the captured shapes of decodes with drafts.
        self._drafted_ms: dict[StepShape, float] = {}
        self.launched = NOTHING_LAUNCHED

    @property
    def num_captured(self) -> int:
        """Graphs captured so far, whether or not they were kept.

        It stands still once the runner is warm.
        """
        drafters = 0 if self.speculation is None else self.speculation.num_captured
        return drafters if self._graphs is None else drafters + self._graphs.num_captured

    @property
    def captured_mixed_sizes(self) -> tuple[int, ...]:
        """Tokens of the shapes that steps with prompts are padded to, ascending."""
        mixed = (shape for shape in widest(self._shapes) if shape.num_tiles)
        return tuple(shape.num_tokens for shape in mixed if not shape.fewest_tokens)

    @property
    def drafted_graphs(self) -> tuple[tuple[int, float], ...]:
        """Tokens of the kept shapes of decodes with drafts, ascending, and microseconds of each."""
        kept = {shape.num_tokens: shape for shape in self._shapes if shape in self._drafted_ms}
        return tuple((num_tokens, 1e3 * self._drafted_ms[shape]) for num_tokens, shape in kept.items())

    @property
    def draws(self) -> bool:
        """Implements `StepRunner.draws`."""
        return self._model.stage.is_last

    @torch.inference_mode()
    def forward(self, plan: StepPlan, stream: torch.Tensor | None = None) -> torch.Tensor:
        """Takes and gives back rows, then launches the pass over the plan's tokens.

        Returns:
            What `Runner.forward` says; hidden states are valid until the next step.
        """
        if self._model.stage.is_last:
            self._sampler.release(plan.released_rows)
            self._sampler.admit(plan.admissions)
            self._sampler.note_forced(plan.forward)
        self._rows.update_tables(plan.forward)
        copy_planned_blocks(plan.forward, self.kv_caches)
        copy_planned_states(plan.forward, self.kv_caches)
        if self.speculation is not None:
            self.speculation.begin(plan)
        if not plan.forward.rows.size:
            assert not plan.sample.rows.size, "samples without a forward pass"
            self.launched = NOTHING_LAUNCHED
            return self._buffers.hidden[:0]
        draws = None
        if self.speculation is not None:
            plan, draws = self._drawn = widened(plan)
        needed = StepShape.of(plan, self._sizes, self._buffers.gather_capacity)
        has_prompt_logprobs = plan.prompt_logprobs.counts.size > 0
        held = None if has_prompt_logprobs else smallest_holding(self._shapes, needed)
        self._shape = shape = held or self._cut(needed, plan)
        self._is_padded = is_padded = held is not None
        self.launched = Launched(shape.num_tokens, is_padded and self._is_captured(_Piece.FORWARD, shape))
        self._gathers = self._buffers.upload(plan, shape, self._rows.scratch_row, is_padded, draws)
        if stream is not None:
            self._buffers.entering[: len(stream)].copy_(stream)
        if not self._model.stage.is_last:
            self._launch(_Piece.FORWARD, shape)
            # The next step writes there while this one is still being sent.
            return self._buffers.leaving[: plan.num_tokens].clone()
        if is_padded:
            self._launch(_Piece.FORWARD, shape)
            self._follow(plan, shape)
            return self._buffers.hidden[: needed.num_samples]
        # No graph keeps the hidden states that are not sampled.
        hidden = self._forward(shape, wants_all=has_prompt_logprobs)
        self._follow(plan, shape)
        if not has_prompt_logprobs:
            return self._buffers.hidden[: shape.num_samples]
        indices = indices_on_device(hidden_indices(plan.prompt_logprobs), self._device)
        return torch.cat((self._buffers.hidden[: shape.num_samples], hidden[indices]))

    @torch.inference_mode()
    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens | None:
        """Implements `Runner.sample`."""
        if not self._model.stage.is_last:
            self.remember(plan.sample.rows, zero_tokens(plan, self._device))
            return None
        draws = None
        if self._drawn is not None and plan.forward.rows.size:
            plan, draws = self._drawn
        sampled_from, checked, telling = split_hidden(plan, hidden)
        prompts = prompt_logprobs(plan.prompt_logprobs, telling, self._model.logits)
        finite = finite_rows(checked) if len(checked) else None
        if not len(sampled_from):
            return SampledTokens.none(prompts, finite, self._device)
        sampled = self._sample(plan.sample, draws, masks)
        sampled.prompts, sampled.checked = prompts, finite
        return sampled

    def _sample(self, plan: SamplePlan, draws: Draws | None, masks: StepMasks | None) -> SampledTokens:
        """Draws from the hidden states that the forward pass has left."""
        shape, num_samples = self._shape, plan.rows.size
        assert shape is not None, "forward comes before sample"
        if not self._is_padded:
            self._write_logits(num_samples)
        if self._dealt is not None and self._dealt.takes(plan):
            return self._sample_share(self._dealt, shape, plan, masks)
        logits = self._buffers.logits[:num_samples]
        self._model.gather_logits(self._buffers.logits_part[:num_samples], logits)
        drafted = None if draws is None else self._drafted(shape, draws)
        if masks is not None and draws is not None:
            masks = masks.at(draws.firsts)
        traits = self._sampler.change(plan, logits, drafted, masks)
        drawn: _Draw = self._launch(_Piece.DRAW, shape) if self._is_padded else self._draw(shape, num_samples)
        tokens, finite, settled = drawn
        tokens, finite = tokens[:num_samples], finite[:num_samples]
        if self.speculation is None or draws is None or settled is None:
            return self._sampler.finish(plan, traits, logits, tokens, finite)
        accepted = Accepted(*(column[: draws.counts.size] for column in settled))
        sampled = self._sampler.finish(plan, traits, logits, tokens, finite, drafted, accepted.counts)
        hidden = self._buffers.hidden[:num_samples]
        self.speculation.settle(sampled, accepted, draws, plan.rows[draws.firsts], hidden)
        return sampled

    def _sample_share(
        self, dealt: DealtDraws, shape: StepShape, plan: SamplePlan, masks: StepMasks | None
    ) -> SampledTokens:
        """Draws this rank's share of the rows, and gets the other ranks' tokens."""
        num_samples = plan.rows.size
        own = dealt.begin(plan, self._buffers.logits_part[:num_samples], self._buffers.logits, masks)
        share = dealt.share(shape.num_samples if self._is_padded else num_samples)
        self._buffers.upload_own(own.plan, share, self._rows.scratch_row)
        marked = self._launch(_Piece.SHARE_DRAW, shape) if self._is_padded else self._draw_share(dealt, share)
        sampled = dealt.end(plan, marked[: dealt.share(num_samples)])
        rows = self._buffers.columns(shape).sample_rows[:num_samples]
        store_last_tokens(self._rows.last_tokens, rows, sampled.tokens)
        return sampled

    def _drafted(self, shape: StepShape, draws: Draws) -> DraftedDraws:
        """What draws of a worker that drafts depend on."""
        num_draws = int(draws.counts.sum())
        columns, (token_ids, _) = self._buffers.columns(shape), self._buffers.tokens(shape)
        return DraftedDraws(
            draws.counts,
            draws.firsts,
            self._sizes.tokens_per_row,
            token_ids,
            columns.sample_tokens[:num_draws],
            columns.output_positions[:num_draws],
        )

    def _follow(self, plan: StepPlan, shape: StepShape) -> None:
        """Shows the drafter what was computed, if there is one."""
        if self.speculation is None:
            return
        if self._is_padded and self._is_captured(_Piece.FORWARD, shape):
            computed = self._captured_tokens[shape]
        else:
            assert self._inputs is not None, "a forward pass has inputs"
            computed = _computed(self._inputs)
        self.speculation.follow(plan, computed)

    @torch.inference_mode()
    def remember(self, rows: Int32Column, tokens: torch.Tensor) -> None:
        """Implements `Runner.remember`."""
        if rows.size:
            store_last_tokens(self._rows.last_tokens, copy_to_device(rows, self._device), tokens)

    def reset(self) -> None:
        """Gives back all rows.

        Block tables and last tokens are written anew when a row is taken.
        """
        self._sampler.release_all()
        if self.speculation is not None:
            self.speculation.reset()

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Captures all shapes, then drops each that takes no less time than a larger one.

        The largest comes first, so that the smaller ones find their memory in the pool.

        Args:
            progress: Called with (phase, done, total, unit).
        """
        if self._graphs is None:
            return
        shapes, self._gathers = self._shapes[::-1], ()
        # Layers of one kind launch the same kernels, so that a few of them load all. All shapes are
        # prepared together, because ranks agree on these layers each time.
        with self._model.representative_layers():
            for shape in shapes:
                self._pad(shape)
                for piece in self._pieces(shape):
                    self._graphs.prepare(functools.partial(self._run, piece, shape))
        for done, shape in enumerate(shapes):
            progress("graphs", done, len(shapes), "shapes")
            self._pad(shape)
            for piece in self._pieces(shape):
                self._graphs.capture((piece, shape), functools.partial(self._run, piece, shape))
            if self.speculation is not None and self._inputs is not None:
                self._captured_tokens[shape] = _computed(self._inputs, shape)
        progress("graphs", len(self._shapes), len(self._shapes), "shapes")
        self._keep_undominated(self._graphs)
        if self.speculation is not None:
            decodes = [shape for shape in self._shapes if not shape.num_tiles]
            kept: dict[Hashable, ComputedTokens] = {shape: self._captured_tokens[shape] for shape in decodes}
            self.speculation.capture(progress, kept, self._pad)

    def _pad(self, shape: Hashable) -> None:
        """Fills the columns, which all shapes share, with those of a step of padding."""
        assert isinstance(shape, StepShape), "a key of what is captured"
        self._buffers.upload_padding(shape, self._rows.scratch_row)

    def _cut(self, needed: StepShape, plan: StepPlan) -> StepShape:
        """What a step needs that is launched kernel by kernel."""
        first_piece = self._model.first_piece(needed.num_tokens, is_captured=False)
        return needed if first_piece is None else needed.cut(plan, first_piece, self._sizes)

    def _keep_undominated(self, graphs: StepGraphs) -> None:
        # Nothing shorter is padded to a full step, so that none competes with it.
        wide = [shape for shape in widest(self._shapes) if not shape.fewest_tokens]
        large = [shape for shape in wide if shape.num_tokens >= _TIMED_FROM_TOKENS]
        # How many drafts pay depends on what each of these takes.
        drafted = [shape for shape in self._shapes if shape.is_drafted]
        launches = {shape: functools.partial(self._replay_full, shape) for shape in (*large, *drafted)}
        # Tokens that are all alike would choose the same experts: of later stages those of padding,
        # and those that attend to one slot.
        self._buffers.entering.normal_()
        with self._rows.own_blocks():
            found = graphs.times_ms(launches)
        times = dict(zip(found, self._agreed_times(list(found.values())), strict=True))
        self._drafted_ms = {shape: times[shape] for shape in drafted}
        kept = undominated(self._shapes, {shape: times[shape] for shape in large})
        for shape in set(self._shapes) - set(kept):
            for piece in self._pieces(shape):
                graphs.drop((piece, shape))
        self._shapes = tuple(kept)

    def _replay_full(self, shape: StepShape) -> None:
        """Launches a captured step that is full of different tokens."""
        self._buffers.upload_tokens(shape, self._rows.scratch_row)
        # A step is drawn in one way: in that which every shape has, so that times compare.
        for piece in self._pieces(shape)[:2]:
            self._launch(piece, shape)

    def _pieces(self, shape: StepShape) -> tuple[_Piece, ...]:
        """What is captured of a shape's steps."""
        if not self._model.stage.is_last:
            return (_Piece.FORWARD,)
        if self._dealt is None or not self._dealt.pays(shape.num_samples):
            return _Piece.FORWARD, _Piece.DRAW
        return _Piece.FORWARD, _Piece.DRAW, _Piece.SHARE_DRAW

    def _is_captured(self, piece: _Piece, shape: StepShape) -> bool:
        return self._graphs is not None and (piece, shape) in self._graphs

    def _launch(self, piece: _Piece, shape: StepShape) -> Any:
        if self._graphs is not None and self._is_captured(piece, shape):
            return self._graphs.replay((piece, shape))
        return self._run(piece, shape)

    def _run(self, piece: _Piece, shape: StepShape) -> _Draw | torch.Tensor | None:
        if piece is _Piece.DRAW:
            return self._draw(shape, shape.num_samples)
        if piece is _Piece.SHARE_DRAW:
            assert self._dealt is not None, "no graph of a share without ranks to share with"
            return self._draw_share(self._dealt, self._dealt.share(shape.num_samples))
        self._forward(shape)
        if self._model.stage.is_last:
            self._write_logits(shape.num_samples)
        return None

    def _forward(self, shape: StepShape, wants_all: bool = False) -> torch.Tensor:
        """Inputs from the columns, the model, and the hidden states that are sampled.

        Gives those of all tokens, [num_tokens, hidden_size], if they are wanted. Before the last
        stage, the stream that leaves.
        """
        drafts = None if self.speculation is None else self.speculation.rows
        inputs, stage = self._buffers.inputs(shape, self._rows, self._gathers, drafts), self._model.stage
        if drafts is not None:
            self._inputs = inputs
        entering = inputs.token_ids if stage.is_first else self._buffers.entering[: shape.num_tokens].clone()
        if not stage.is_last:
            stream = self._model(entering, inputs.positions, self.kv_caches, inputs.attention)
            return self._buffers.leaving[: shape.num_tokens].copy_(stream)
        wanted = None if wants_all else self._wanted(shape)
        hidden = self._model(entering, inputs.positions, self.kv_caches, inputs.attention, wanted)
        sampled = self._buffers.columns(shape).sample_tokens
        if wanted is None:
            torch.index_select(hidden, 0, sampled, out=self._buffers.hidden[: shape.num_samples])
        else:
            self._buffers.hidden[: shape.num_samples].copy_(hidden[: shape.num_samples])
        return hidden

    def _wanted(self, shape: StepShape) -> torch.Tensor | None:
        """Indices of sampled tokens, then the first one until they are a multiple of `_LAST_ROWS`.

        None: they are so many that the last layer may as well compute all tokens.
        """
        num_rows = max(-(-shape.num_samples // _LAST_ROWS), 1) * _LAST_ROWS
        if 2 * num_rows > shape.num_tokens:
            return None
        wanted = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        wanted[: shape.num_samples] = self._buffers.columns(shape).sample_tokens
        return wanted

    def _write_logits(self, num_samples: int) -> None:
        """This rank's part of the logits, from the hidden states that are sampled."""
        self._model.write_logits(self._buffers.hidden[:num_samples], self._buffers.logits_part[:num_samples])

    def _draw(self, shape: StepShape, num_samples: int) -> _Draw:
        """Tokens int64 [num_samples], whether the logits of each are finite, what is settled."""
        columns = self._buffers.columns(shape)
        rows, positions = columns.sample_rows[:num_samples], columns.output_positions[:num_samples]
        tokens, finite = self._sampler.draw_all(self._buffers.logits[:num_samples], rows, positions)
        if self.speculation is None:
            store_last_tokens(self._rows.last_tokens, rows, tokens)
            return tokens, finite, None
        where = (columns.sample_tokens[:num_samples], rows, positions)
        drawn = Drawn(tokens, finite, *where, *self._buffers.tokens(shape))
        samples = (columns.first_draws[:num_samples], columns.draw_counts[:num_samples])
        own = self.speculation.rows
        accepted = accept_drafts(drawn, *samples, own.state, self._sizes.tokens_per_row, own.can_stay)
        return tokens, finite, accepted

    def _draw_share(self, dealt: DealtDraws, num_samples: int) -> torch.Tensor:
        """What this rank draws of so many own samples, as `DealtDraws.end` takes it."""
        rows, positions = self._buffers.own_samples(num_samples).unbind()
        return dealt.marked(*self._sampler.draw_all(self._buffers.logits[:num_samples], rows, positions))
