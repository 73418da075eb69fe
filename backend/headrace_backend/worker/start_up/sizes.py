"""What the engine's configuration decides about steps and cache, as start-up needs it.

Owns the choice of fields: whatever plans memory, profiles, warms up or makes a runner gets
`WorkerSizes`, made once at the worker's start, and never the whole configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Self

from headrace_backend.cache_groups import WHOLE_CONTEXTS, CacheLayout, SequenceBlocks
from headrace_backend.config import EngineConfig
from headrace_backend.device_defaults import default_graph_sizes, long_graph_sizes, mixed_graph_sizes
from headrace_backend.pp_rules import WHOLE, Stage
from headrace_backend.worker.speculation.followed_passes import followed_sizes
from headrace_kernels.attention.plan import MAX_DECODE_QUERY_LEN, drafted_query_len
from headrace_model_folder import ModelConfig


def fitting_tokens_per_row(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens that a step settles for a row that decodes.

    Where the number of drafts is not configured, they are as many as the decode kernel takes for
    the model's query heads; and where recurrent layers keep a state for each draft, no more than it
    takes of prompts.
    """
    most = config.tokens_per_row
    if most == 1 or config.fixed_drafts() is not None:
        return most
    if model.description.recurrent_layers:
        return min(most, MAX_DECODE_QUERY_LEN)
    group = max(attention.num_heads // attention.num_kv_heads for attention in model.description.attentions)
    return min(most, drafted_query_len(most, group))


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSizes:
    """Sizes of a worker's steps and of its cache."""

    # Rows of the batch, and tokens of the largest step.
    max_num_seqs: int
    max_num_batched_tokens: int
    # Tokens of the longest sequence.
    max_model_len: int
    # Tokens of a block of the KV cache.
    block_size: int
    # Blocks of the cache, or its bytes; 0: whatever the memory leaves.
    num_blocks: int
    kv_memory: int
    kv_dtype: Literal["auto", "fp8", "int8"]
    # Ranks that share the model, or a stage of it.
    num_ranks: int
    # Rows of decode steps to capture as graphs, ascending; none where graphs are off.
    batch_graphs: tuple[int, ...]
    # Tokens of steps with prompts to capture, and of longer ones to capture where it pays.
    mixed_graphs: tuple[int, ...]
    long_graphs: tuple[int, ...]
    # Which of several pipeline stages the worker is of.
    stage: Stage = WHOLE
    # Who drafts tokens, and most tokens that a step settles for a row: one more than are drafted.
    speculate: Literal["off", "ngram", "suffix", "draft", "eagle", "mtp"] = "off"
    tokens_per_row: int = 1
    # How layers share the cache's blocks.
    cache: CacheLayout = WHOLE_CONTEXTS
    # Whether the model is a mixture of experts.
    has_experts: bool = False
    # States of recurrent layers to keep for prefixes; None: as many as rows, as far as memory goes.
    num_checkpoints: int | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        max_model_len: int,
        stage: Stage = WHOLE,
        cache: CacheLayout = WHOLE_CONTEXTS,
        tokens_per_row: int = 0,
        has_experts: bool = False,
    ) -> Self:
        """The configured sizes.

        Args:
            config: The engine's configuration.
            max_model_len: Longest sequence in tokens, with the model's context in place of 0.
            stage: Which of several pipeline stages the worker is of.
            cache: How the stage's layers share the cache's blocks.
            tokens_per_row: Most tokens that a step settles for a row; 0: as the configuration says.
            has_experts: Whether the model is a mixture of experts.
        """
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            kv_memory=int(config.kv_memory),
            kv_dtype=config.kv_dtype,
            num_ranks=config.tp,
            batch_graphs=config.captured_batch_sizes(has_experts),
            mixed_graphs=config.captured_mixed_sizes(),
            long_graphs=config.long_graph_sizes(),
            stage=stage,
            speculate=config.speculate,
            tokens_per_row=tokens_per_row or config.tokens_per_row,
            cache=cache,
            has_experts=has_experts,
            num_checkpoints=config.state_checkpoints if config.enable_prefix_cache is not False else 0,
        )

    def with_steps(self, max_num_batched_tokens: int, max_num_seqs: int) -> Self:
        """The sizes with steps of another size, with the default graphs if there were any."""
        captures = bool(self.batch_graphs)
        return dataclasses.replace(
            self,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            batch_graphs=default_graph_sizes(max_num_seqs, self.has_experts) if captures else (),
            mixed_graphs=mixed_graph_sizes(max_num_batched_tokens) if captures else (),
            long_graphs=long_graph_sizes(max_num_batched_tokens) if captures else (),
        )

    def without_graphs(self) -> Self:
        """The sizes with nothing to capture."""
        return dataclasses.replace(self, batch_graphs=(), mixed_graphs=(), long_graphs=())

    @property
    def num_groups(self) -> int:
        """Cache groups, in each of which a row has a block table."""
        return len(self.cache.groups)

    @property
    def sequence_blocks(self) -> SequenceBlocks:
        """How many blocks one sequence takes that has the cache for itself."""
        return SequenceBlocks(self.block_size, self.cache.groups, self.max_num_batched_tokens)

    @property
    def max_rows(self) -> int:
        """Most rows of one step: each has a token at least."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def followed_graphs(self) -> tuple[int, ...]:
        """Tokens of a draft model's passes to capture in which it follows steps, ascending."""
        return followed_sizes(self.max_num_batched_tokens) if self.batch_graphs and self.speculate == "draft" else ()

    @property
    def num_drafts(self) -> int:
        """Most drafted tokens of a row."""
        return self.tokens_per_row - 1

    @property
    def max_draws(self) -> int:
        """Most tokens that one step draws."""
        return self.max_num_seqs * self.tokens_per_row
