"""Cache groups: layers whose keys and values share the blocks of one table per sequence.

Owns what engine and workers both must know of them: which layers of a stage form which group, how
far back a group looks, and how many blocks a sequence holds at most. No torch. Who has which block
is `engine.cache`'s, where the blocks' memory lies the worker's.

Layers that look equally far back form a group: those that see everything, and those of each
sliding window. All groups take their blocks from one pool, so a block has the same bytes in each of
them: it holds `block_size` tokens in `num_places` layers. Layers of one kind that are more than
that form several groups. With 12 layers of each kind a block has 12 places and there are two
groups; with 10 full layers and 52 of a window of 1,024 it has 10, and there are 1 + 6 groups, in
which 8 places stay empty.

A place is as large as the largest layer that has it. Layers whose heads are fewer or smaller than
those of others leave a part of it empty. Layers that read other layers' keys and values have no
place of their own.

Pipeline stages compute different layers of the same sequences by one set of tables, so that all
have the same groups, and each as many places as its largest group needs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from headrace_backend.config import EngineConfig
from headrace_backend.pp_rules import WHOLE, Stage, stage_part, stages
from headrace_model_folder import ModelConfig

# Stands in a table for a block that went back to the pool, as no layer of the group looks so far
# back any more.
NO_BLOCK = -1
# Tables cost memory and a little of every step. Most models have two kinds of layers in simple
# proportions and take two to seven.
_MOST_GROUPS = 8
# Another group must save so much of a long sequence's blocks.
_LEAST_SAVING = 0.02
# The length by which divisions of the layers are compared: so many times the widest window.
_LONG_CONTEXT = 8


class CacheGroup(NamedTuple):
    """Layers that share a block table."""

    # Tokens that a token sees in these layers, itself included; None: all before it.
    window: int | None = None

    def first_needed(self, position: int, block_size: int) -> int:
        """Index of the first block that a token at `position`, or any later one, reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens holds at a time.

        Args:
            num_tokens: Tokens whose keys and values are computed, one after the other.
            block_size: Tokens of a block.
            step_tokens: Most tokens that one step computes; what the first of them sees is held.
        """
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        # Blocks go back whenever settled tokens have filled another block. So the window reaches
        # back from that block's end at least, and a step may begin at the end of the next.
        before, after = self.window - 1, max(step_tokens, 1) - 1
        return min(whole, -(-before // block_size) + 1 + -(-after // block_size))


# What a model has whose layers all keep their whole context, whether or not they look at all of it.
ONE_GROUP = (CacheGroup(),)


class SequenceBlocks(NamedTuple):
    """How many blocks of all groups a sequence holds that has the cache for itself."""

    # Tokens of a block.
    block_size: int
    groups: tuple[CacheGroup, ...] = ONE_GROUP
    # Most tokens of one step.
    step_tokens: int = 1

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of so many tokens holds at a time.

        It may have to wait for a step in flight before it goes on.
        """
        return sum([group.most_blocks(num_tokens, self.block_size, self.step_tokens) for group in self.groups])

    def most_tokens(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest sequence that so many blocks hold, at most `limit`."""
        if self.most_blocks(limit) <= num_blocks:
            return limit
        # Blocks of a table: `low` of them fit, `high` do not.
        low, high = 0, -(-limit // self.block_size)
        while high - low > 1:
            middle = (low + high) // 2
            if self.most_blocks(middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle
        return low * self.block_size


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the layers of a stage share the pool's blocks."""

    # The same in all stages; one without a window comes first if there is one.
    groups: tuple[CacheGroup, ...] = ONE_GROUP
    # Group of each layer of the stage; empty: all are in the first.
    layer_groups: tuple[int, ...] = ()
    # Layers whose keys and values a block holds; 0: all of the stage's.
    num_places: int = 0

    def layer_places(self) -> tuple[int, ...]:
        """Returns each layer's place in the blocks of its group, which no other layer of it has."""
        taken = [0] * len(self.groups)
        places = []
        for group in self.layer_groups:
            places.append(taken[group])
            taken[group] += 1
        return tuple(places)


# All layers in one group that keeps whole contexts.
WHOLE_CONTEXTS = CacheLayout()


class _KvLayer(NamedTuple):
    """A layer that keeps keys and values."""

    # None where it sees everything.
    window: int | None
    # Of one token's keys, or values.
    elements: int


_KvLayers = Sequence[_KvLayer]


def cache_layout(
    config: EngineConfig, model: ModelConfig, stage: Stage = WHOLE, has_draft: bool = False
) -> CacheLayout:
    """Divides a stage's layers into cache groups.

    Engine and workers ask for it independently, and come to the same groups. A draft model or head
    keeps whole contexts, in blocks with the numbers of the first group's. Where no layer of the
    model that it drafts for does so, all of them do.

    Args:
        config: The engine's configuration.
        model: The whole model.
        stage: Which of several pipeline stages has the layers.
        has_draft: Whether a model or head drafts that the configuration does not name.
    """
    longest = config.max_model_len or model.max_position_embeddings
    of_stages = [_kv_layers(model, part, longest) for part in (stages(config, model) if config.pp > 1 else (stage,))]
    windows = [layer.window for layer in itertools.chain.from_iterable(of_stages)]
    if (has_draft or config.drafts_by_passes) and None not in windows:
        return WHOLE_CONTEXTS
    groups = _best_groups(of_stages)
    return WHOLE_CONTEXTS if groups == ONE_GROUP else _layout(_kv_layers(model, stage, longest), groups)


def _kv_layers(model: ModelConfig, stage: Stage, longest: int) -> list[_KvLayer]:
    """Layers that keep keys; a window that reaches as far as the longest sequence is none."""
    return [
        _KvLayer(
            None if attention.window is None or attention.window >= longest else attention.window,
            attention.num_kv_heads * attention.head_dim,
        )
        for attention in stage_part(model.description, stage).kv_attentions
    ]


def _best_groups(of_stages: Sequence[_KvLayers]) -> tuple[CacheGroup, ...]:
    """Chooses the groups that hold a long sequence in the fewest bytes, or in nearly as few.

    The stage that needs the most decides, as all have the same number of blocks.
    """
    counts = Counter(layer.window for layer in itertools.chain.from_iterable(of_stages))
    kinds = sorted(counts, key=lambda window: window or math.inf, reverse=True)
    best: tuple[CacheGroup, ...] = (CacheGroup(None if None in counts else max(filter(None, counts))),)
    if len(kinds) == 1:
        return best
    context = _LONG_CONTEXT * max(filter(None, kinds))
    least = _cost(of_stages, best, context)
    sizes = range(1, max(counts.values()) + 1)
    for numbers in sorted({tuple(-(-counts[kind] // size) for kind in kinds) for size in sizes}, key=sum):
        groups = tuple(CacheGroup(kind) for kind, number in zip(kinds, numbers, strict=True) for _ in range(number))
        cost = _cost(of_stages, groups, context)
        if len(groups) <= _MOST_GROUPS and cost < (1 - _LEAST_SAVING) * least:
            best, least = groups, cost
    return best


def _cost(of_stages: Sequence[_KvLayers], groups: tuple[CacheGroup, ...], context: int) -> int:
    """Elements that the stage which needs the most has room for, in a long sequence."""
    num_tokens = sum(min(group.window or context, context) for group in groups)
    return num_tokens * max(_token_elements(layers, groups) for layers in of_stages)


def _token_elements(layers: _KvLayers, groups: tuple[CacheGroup, ...]) -> int:
    """Elements of one token's keys in all places of a stage's blocks."""
    largest: dict[int, int] = {}
    for layer, place in zip(layers, _layout(layers, groups).layer_places(), strict=True):
        largest[place] = max(layer.elements, largest.get(place, 0))
    return sum(largest.values())


def _layout(layers: _KvLayers, groups: tuple[CacheGroup, ...]) -> CacheLayout:
    """Deals a stage's layers out to the groups that look as far back as they do, or further."""
    if len(groups) == 1:
        return CacheLayout(groups, (0,) * len(layers), len(layers))
    turns = {kind: itertools.cycle([i for i, group in enumerate(groups) if group == kind]) for kind in set(groups)}
    dealt = tuple(next(turns[CacheGroup(layer.window)]) for layer in layers)
    return CacheLayout(groups, dealt, max(Counter(dealt).values()))
