"""Divides the device's memory between weights, tables, graphs, activations and cache, or refuses.

Owns the arithmetic: pure functions on numbers, and `free_memory_bytes`, where a number comes from.
It is done twice on a GPU: with estimates before anything is allocated, so that what can't work is
refused within a second; and with what was measured (`profile_step`, `fitted_runner`), so that the
cache gets all that is left. A plan that does not fit is refused with its numbers and with the
nearest values that do.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from headrace_backend.cache_groups import WHOLE_CONTEXTS
from headrace_backend.kv_bytes import kv_heads, place_bytes
from headrace_backend.layers.rotary import tables_bytes
from headrace_backend.models.load import WeightMemory
from headrace_backend.parallel.stage_links import MOST_UNDER_WAY
from headrace_backend.pp_rules import WHOLE, Stage
from headrace_backend.state_rules import row_state_bytes
from headrace_backend.step.messages import MemoryPlan
from headrace_backend.worker.errors import DoesNotFit
from headrace_backend.worker.sampling.penalty_slots import BYTES_PER_TOKEN
from headrace_backend.worker.sampling.prompt_logprobs import CPU_PIECE_ROWS
from headrace_backend.worker.speculation.deferred_steps import noted_bytes
from headrace_backend.worker.speculation.suffix_drafter import memory_bytes
from headrace_backend.worker.start_up.profile_step import Profile
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.step.shape import drafted_totals, has_few_rows
from headrace_kernels.attention.plan import MAX_DECODE_QUERY_LEN
from headrace_model_folder import ModelDescription
from headrace_model_folder.description import Attention, Layer

_MIB = 1 << 20
_GIB = 1 << 30
# On a CPU other processes need memory too.
_CPU_CACHE_SHARE = 0.25
_CPU_CACHE_LIMIT = 4 * _GIB
# On a GPU kept free: the allocator's fragments, and kernels that load their code late. Of the whole
# card.
_GPU_RESERVE_SHARE = 0.0075
_GPU_LEAST_RESERVE = 256 * _MIB
_CGROUP = pathlib.Path("/sys/fs/cgroup")
# The sampler holds about this many float32 copies of the logits at once: logits, log-softmax,
# scaled, noise, two int64 temporaries.
_LOGIT_COPIES = 8
# States that are kept for prefixes get so much of what weights, steps and rows' states leave,
# unless their number is configured. Reckoned, not measured: a state of a 9B model takes as much as
# keys and values of 1,600 tokens.
_CHECKPOINT_SHARE = 0.125
# The driver's memory for one captured shape, on top of its activations, which all shapes share. Not
# measured yet on our graphs; other engines' captures of such models take 8 to 10 MiB.
_SHAPE_BYTES = 10 * _MIB


class DraftSizes(NamedTuple):
    """A small model or a head beside the model that is served, as one rank has it."""

    description: ModelDescription
    weights: WeightMemory
    # Bytes of each token in the cache, beside its keys and values.
    state_bytes: int = 0
    # Ranks that share it; 1: each has all of it.
    num_ranks: int = 1


class Room(NamedTuple):
    """The memory there is."""

    device: torch.device
    # What nobody uses.
    free_bytes: int
    # The whole device's; 0 on a CPU.
    device_bytes: int = 0
    # The most that may be taken of it; 0: all.
    budget_bytes: int = 0
    # Workers that have equal shares of what is free and of the budget.
    sharers: int = 1

    @classmethod
    def of_rank(
        cls, device: torch.device, free_bytes: int, device_bytes: int, budget_bytes: int, num_ranks: int
    ) -> Room:
        """One rank's: all of its card, or its share of the machine."""
        return cls(device, free_bytes, device_bytes, budget_bytes, num_ranks if device.type == "cpu" else 1)

    @property
    def free_share(self) -> int:
        """This worker's share of the memory that nobody uses, in bytes."""
        return self.free_bytes // self.sharers

    @property
    def usable_bytes(self) -> int:
        """What the worker may use in all."""
        return min(self.free_share, self.budget_bytes // self.sharers) if self.budget_bytes else self.free_share

    @property
    def reserve_bytes(self) -> int:
        """What stays free."""
        if self.device.type == "cpu":
            return 0
        return max(int((self.device_bytes or self.free_bytes) * _GPU_RESERVE_SHARE), _GPU_LEAST_RESERVE)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that the model and the configuration call for."""

    weights: int
    activations: int
    kv_block: int
    graphs: int = 0
    # Of the activations: what is taken together with the weights.
    scratch: int = 0
    # Cosines and sines of all positions, which are taken together with the weights, too.
    rotary: int = 0
    # Of the graphs' activations, for each token of the largest that is captured.
    graph_token: int = 0
    # Residual streams of steps on their way between pipeline stages.
    streams: int = 0
    # States that all rows have in recurrent layers; one row's, which is a checkpoint's too; and of
    # all checkpoints.
    states: int = 0
    checkpoint: int = 0
    checkpoints: int = 0
    # The driver's and libraries' own.
    other: int = 0
    is_measured: bool = False

    @property
    def beside_cache(self) -> int:
        """All but the cache."""
        states = self.states + self.checkpoints
        model = self.weights + self.rotary
        return model + self.activations + self.graphs + self.streams + states + self.other


def model_memory(
    model: ModelDescription,
    sizes: WorkerSizes,
    weights: WeightMemory,
    dtype: torch.dtype,
    on_gpu: bool = False,
    draft: DraftSizes | None = None,
) -> ModelMemory:
    """Estimates weights, rotary tables, graphs, a block of all layers, and a step's activations.

    The activations are those of a step at the token budget. A draft model computes the same steps,
    and a block holds its keys and values beside the model's.
    """
    if draft is not None:
        alone = dataclasses.replace(sizes, num_ranks=draft.num_ranks, stage=WHOLE, cache=WHOLE_CONTEXTS)
        beside = model_memory(draft.description, alone, draft.weights, dtype, on_gpu)
        beside = dataclasses.replace(
            beside,
            activations=beside.activations + _noted_bytes(sizes, on_gpu),
            kv_block=beside.kv_block + sizes.block_size * draft.state_bytes,
        )
        both = _both(model_memory(model, sizes, weights, dtype, on_gpu), beside)
        return dataclasses.replace(both, graphs=both.graphs + (_followed_bytes(sizes, beside) if on_gpu else 0))
    size = dtype.itemsize
    # The largest of any layer: layers follow each other in the same memory.
    heads = max(_heads_elements(layer) for layer in model.layers)
    inner = max(layer.mlp.token_elements for layer in model.layers)
    # Residual and normed stream, and what lies between the projections of attention and MLP.
    per_token = size * (4 * model.hidden_size + heads + inner + _own_inputs_elements(model))
    if sizes.num_ranks > 1 and not on_gpu:
        per_token += model.hidden_size * _gathered_bytes(sizes.num_ranks, size)
    # Log probabilities of prompts take pieces of the CPU's size with half as many copies at most.
    rows = max(sizes.max_draws, CPU_PIECE_ROWS // 2)
    sampled = model.vocab_size * (4 * rows * _LOGIT_COPIES + sizes.max_num_seqs * BYTES_PER_TOKEN)
    if not sizes.stage.is_last:
        sampled = 0
    # Tokens of all rows, from which drafts are looked up.
    history = _history_bytes(sizes)
    return ModelMemory(
        weights=weights.weights,
        activations=sizes.max_num_batched_tokens * per_token + sampled + history + weights.scratch,
        kv_block=_kv_block_bytes(model, sizes, size),
        graphs=_graphs_estimate(sizes, per_token) if on_gpu else 0,
        scratch=weights.scratch,
        rotary=tables_bytes(model, sizes.max_model_len),
        graph_token=per_token,
        # Padding has a line of its own.
        states=(sizes.max_num_seqs + 1) * row_state_bytes(model, sizes.num_drafts),
        checkpoint=row_state_bytes(model, sizes.num_drafts),
        streams=_num_streams(sizes.stage) * sizes.max_num_batched_tokens * model.hidden_size * size,
    )


def _own_inputs_elements(model: ModelDescription) -> int:
    """Elements of a token's inputs of all layers: as projected, normed, and of the table."""
    inputs = model.per_layer_embedding
    return 0 if inputs is None else 3 * inputs.projection.outputs


def _heads_elements(layer: Layer) -> int:
    """Elements of a token between the projections of a layer's attention.

    These are queries, keys and values with their rotated copies; of linear attention what is
    convolved, and queries, keys and values of each value head in fp32.
    """
    attention = layer.attention
    if isinstance(attention, Attention):
        # Also of layers that have no projection of keys or values.
        width = attention.query.outputs + 2 * attention.num_kv_heads * attention.head_dim
        return 3 * width
    projected = attention.num_channels + attention.gate.outputs + attention.correction.outputs
    return 3 * projected + 4 * attention.num_value_heads * (attention.key_dim + attention.value_dim)


def _kv_block_bytes(model: ModelDescription, sizes: WorkerSizes, item_bytes: int) -> int:
    """Bytes of a block in all of its places."""
    places, is_quantized = sizes.cache.layer_places(), sizes.kv_dtype != "auto"
    return sum(place_bytes(kv_heads(model), places, sizes.block_size, item_bytes, is_quantized))


def _history_bytes(sizes: WorkerSizes) -> int:
    """Bytes of all rows' tokens, and of earlier answers, where drafts are looked up in them."""
    if sizes.speculate == "suffix":
        return memory_bytes(sizes.max_num_seqs, sizes.max_model_len)
    return 4 * sizes.max_num_seqs * sizes.max_model_len if sizes.speculate == "ngram" else 0


def _noted_bytes(sizes: WorkerSizes, on_gpu: bool) -> int:
    """Bytes of tokens that a draft model has not followed yet; on a CPU it follows every step."""
    return noted_bytes(sizes.max_num_seqs, sizes.max_model_len) if on_gpu and sizes.speculate == "draft" else 0


def _followed_bytes(sizes: WorkerSizes, draft: ModelMemory) -> int:
    """Bytes of the graphs in which a draft model follows steps: activations, and each one's own."""
    followed = sizes.followed_graphs
    return max(followed, default=0) * draft.graph_token + len(followed) * _SHAPE_BYTES


def _both(model: ModelMemory, draft: ModelMemory) -> ModelMemory:
    """What two models call for together; graphs have the activations of the larger one."""
    return dataclasses.replace(
        model,
        weights=model.weights + draft.weights,
        activations=model.activations + draft.activations,
        kv_block=model.kv_block + draft.kv_block,
        graphs=max(model.graphs, draft.graphs),
        scratch=model.scratch + draft.scratch,
        rotary=model.rotary + draft.rotary,
        graph_token=max(model.graph_token, draft.graph_token),
    )


def _num_streams(stage: Stage) -> int:
    """Most steps whose streams a stage holds beside the one that it computes."""
    # What comes is held until it is copied; what leaves, until it has arrived.
    return (not stage.is_first) + (MOST_UNDER_WAY + 1) * (not stage.is_last)


def _gathered_bytes(world_size: int, size: int) -> int:
    """Bytes that ranks on a CPU take for each number that they all-reduce.

    That is everybody's number, and in fp32 the sum, the sum before and, of shorter types, a
    summand.
    """
    return world_size * size + (8 if size == 4 else 12)


def _graphs_estimate(sizes: WorkerSizes, bytes_per_token: int) -> int:
    """Activations of the largest shape, and every shape's own.

    Logits are in the runner's buffers.
    """
    batches = sizes.batch_graphs
    if not batches:
        return 0
    few = [size for size in sizes.mixed_graphs if has_few_rows(size, sizes.max_num_seqs)]
    captured = (*batches, *sizes.mixed_graphs, *few)
    if sizes.num_drafts:
        drafted = [
            total for total in drafted_totals(batches, sizes.tokens_per_row) if total <= sizes.max_num_batched_tokens
        ]
        # One for all drafts, and beyond the decode kernel's usual queries one for half of them and
        # one for a few.
        captured += tuple(drafted) * (3 if sizes.tokens_per_row > MAX_DECODE_QUERY_LEN else 1)
    return max(captured) * bytes_per_token + len(captured) * _SHAPE_BYTES


def with_long_graphs(memory: ModelMemory, sizes: WorkerSizes, long_sizes: Sequence[int]) -> ModelMemory:
    """The estimate where steps of so many tokens, ascending, are captured beside the usual ones.

    What is drawn from them is no more.
    """
    if not long_sizes:
        return memory
    longer = long_sizes[-1] - max(sizes.batch_graphs + sizes.mixed_graphs)
    full = set(long_sizes).difference(sizes.long_graphs)
    num_shapes = len(long_sizes) + sum(has_few_rows(size, sizes.max_num_seqs, is_full=True) for size in full)
    return dataclasses.replace(
        memory, graphs=memory.graphs + max(longer, 0) * memory.graph_token + num_shapes * _SHAPE_BYTES
    )


def measured_memory(estimate: ModelMemory, profile: Profile, room: Room) -> ModelMemory:
    """The estimate with measured values in it.

    Graphs are still an estimate, since they are captured over the cache that this is to size.
    """
    other = max(room.free_bytes - profile.free - profile.weights, 0)
    return dataclasses.replace(
        estimate,
        weights=profile.weights - estimate.scratch - estimate.rotary,
        activations=profile.activations + estimate.scratch,
        other=other,
        is_measured=True,
    )


def plan_memory(sizes: WorkerSizes, memory: ModelMemory, room: Room) -> MemoryPlan:
    """Divides the memory.

    Args:
        sizes: Sizes above all of the cache, which holds at least one sequence of `max_model_len`
            unless its size is configured.
        memory: What the model needs.
        room: What there is.

    Raises:
        DoesNotFit: It does not fit. The message holds the arithmetic and the nearest value that
            fits, if there is one.
    """
    num_checkpoints = _num_checkpoints(sizes, memory, room)
    memory = dataclasses.replace(memory, checkpoints=num_checkpoints * memory.checkpoint)
    num_blocks = sizes.num_blocks or (sizes.kv_memory or _cache_share(memory, room)) // memory.kv_block
    needed_blocks = _needed_blocks(sizes)
    cache_bytes = max(num_blocks, needed_blocks) * memory.kv_block
    if num_blocks < needed_blocks or memory.beside_cache + cache_bytes + room.reserve_bytes > room.usable_bytes:
        raise DoesNotFit(
            f"{_arithmetic(sizes, memory, cache_bytes, room)}{_cache_rule(sizes, room)}"
            f"{_fewer_checkpoints(sizes, memory, room) or _nearest(sizes, memory, room)}"
        )
    return MemoryPlan(
        device=str(room.device),
        total_bytes=room.usable_bytes,
        weight_bytes=memory.weights,
        rotary_bytes=memory.rotary,
        activation_bytes=memory.activations,
        graph_bytes=memory.graphs,
        stream_bytes=memory.streams,
        state_bytes=memory.states,
        kv_cache_bytes=cache_bytes,
        kv_block_bytes=memory.kv_block,
        num_blocks=num_blocks,
        block_size=sizes.block_size,
        is_measured=memory.is_measured,
        device_bytes=room.device_bytes,
        other_bytes=memory.other,
        reserve_bytes=room.reserve_bytes,
        num_cache_groups=sizes.num_groups,
        num_checkpoints=num_checkpoints,
        checkpoint_bytes=memory.checkpoints,
    )


def _needed_blocks(sizes: WorkerSizes) -> int:
    """Fewest blocks that a cache must have."""
    return 1 if sizes.num_blocks or sizes.kv_memory else sizes.sequence_blocks.most_blocks(sizes.max_model_len)


def _num_checkpoints(sizes: WorkerSizes, memory: ModelMemory, room: Room) -> int:
    """States that are kept for prefixes: the configured number, or as many as rows if they fit."""
    if not memory.checkpoint:
        return 0
    if sizes.num_checkpoints is not None:
        return sizes.num_checkpoints
    left = room.usable_bytes - room.reserve_bytes - memory.beside_cache
    share = min(int(left * _CHECKPOINT_SHARE), left - _least_cache(sizes, memory))
    return min(sizes.max_num_seqs, max(share, 0) // memory.checkpoint)


def _least_cache(sizes: WorkerSizes, memory: ModelMemory) -> int:
    """Bytes of the configured cache, or of the smallest that may be."""
    return max(sizes.kv_memory, (sizes.num_blocks or _needed_blocks(sizes)) * memory.kv_block)


def plan_estimate(
    sizes: WorkerSizes,
    model: ModelDescription,
    weights: WeightMemory,
    dtype: torch.dtype,
    room: Room,
    draft: DraftSizes | None = None,
) -> tuple[ModelMemory, MemoryPlan]:
    """The plan before anything is allocated, and the estimates behind it.

    Raises:
        DoesNotFit: As `plan_memory`; where no cache fits at all, the message names smaller steps
            that leave room for one.
    """
    memory = model_memory(model, sizes, weights, dtype, room.device.type == "cuda", draft)
    try:
        return memory, plan_memory(sizes, memory, room)
    except DoesNotFit as refused:
        if sizes.num_blocks or sizes.kv_memory or _most_blocks(sizes, memory, room):
            raise
        raise DoesNotFit(f"{refused}; {_smaller_steps(sizes, model, weights, dtype, room, draft)}") from None


def _smaller_steps(
    sizes: WorkerSizes,
    model: ModelDescription,
    weights: WeightMemory,
    dtype: torch.dtype,
    room: Room,
    draft: DraftSizes | None,
) -> str:
    """The largest of smaller steps that leave room for a cache, as the end of a refusal."""
    tokens, rows = sizes.max_num_batched_tokens, sizes.max_num_seqs
    while tokens > 16 or rows > 1:
        tokens, rows = max(tokens // 2, 16), max(rows // 2, 1)
        smaller = sizes.with_steps(tokens, rows)
        memory = model_memory(model, smaller, weights, dtype, room.device.type == "cuda", draft)
        if _most_blocks(smaller, memory, room):
            return f"max_num_batched_tokens {tokens} with max_num_seqs {rows} leaves room for a cache"
    return "no step is small enough: weights and rotary tables (by max_model_len) leave no room"


def _cache_share(memory: ModelMemory, room: Room) -> int:
    """Bytes of a cache that nobody has configured."""
    left = max(0, room.usable_bytes - room.reserve_bytes - memory.beside_cache)
    if room.device.type == "cpu":
        # A budget says already what is left to others.
        share = left if room.budget_bytes else int(room.free_share * _CPU_CACHE_SHARE)
        return min(share, _CPU_CACHE_LIMIT)
    return left


def _most_blocks(sizes: WorkerSizes, memory: ModelMemory, room: Room) -> int:
    """Blocks of the largest cache that fits."""
    left = max(0, room.usable_bytes - room.reserve_bytes - memory.beside_cache)
    if not (sizes.num_blocks or sizes.kv_memory):
        left = min(left, _cache_share(memory, room))
    return left // memory.kv_block


def _arithmetic(sizes: WorkerSizes, memory: ModelMemory, cache_bytes: int, room: Room) -> str:
    """Every summand, their sum and what there is."""
    parts = [("weights", memory.weights), ("rotary tables", memory.rotary), ("activations", memory.activations)]
    parts += [("graphs", memory.graphs)]
    parts += [("streams between stages", memory.streams), ("states of recurrent layers", memory.states)]
    parts += [("kept states (state_checkpoints)", memory.checkpoints)]
    parts += [("driver and libraries", memory.other), ("reserve", room.reserve_bytes)]
    summands = [f"{name} {_mib(size)}" for name, size in parts if size or name in ("weights", "activations")]
    blocks = f"{cache_bytes // memory.kv_block} blocks of {sizes.block_size} tokens, {memory.kv_block} bytes each"
    total = memory.beside_cache + room.reserve_bytes + cache_bytes
    return f"{' + '.join(summands)} + KV cache {_mib(cache_bytes)} ({blocks}) = {_mib(total)}; {_there_is(room)}"


def _there_is(room: Room) -> str:
    """What a sum is held against, for the message of a refusal."""
    there_is = f"{_mib(room.free_bytes)} are free on {room.device}"
    if room.budget_bytes:
        there_is = f"memory_budget is {room.budget_bytes} ({_mib(room.budget_bytes)}), {there_is}"
    return there_is if room.sharers == 1 else f"{there_is}, of which each of {room.sharers} ranks gets its share"


def _cache_rule(sizes: WorkerSizes, room: Room) -> str:
    """How the cache's size came about, for the message of a refusal."""
    if sizes.num_blocks:
        return f", num_blocks is {sizes.num_blocks}"
    if sizes.kv_memory:
        return f", kv_memory is {sizes.kv_memory}"
    if room.device.type == "cpu" and not room.budget_bytes:
        return ", of which the cache gets a quarter, at most 4 GiB, and must hold one sequence of max_model_len"
    return ", and the cache must hold one sequence of max_model_len"


def _nearest(sizes: WorkerSizes, memory: ModelMemory, room: Room) -> str:
    """The value of the same setting that fits, if there is one."""
    most = _most_blocks(sizes, memory, room)
    if not most:
        return ""
    if sizes.num_blocks:
        return f"; num_blocks of at most {most} fits"
    if sizes.kv_memory:
        return f"; kv_memory from {memory.kv_block} (one block) to {most * memory.kv_block} fits"
    return f"; max_model_len of at most {sizes.sequence_blocks.most_tokens(most, sizes.max_model_len)} fits"


def _fewer_checkpoints(sizes: WorkerSizes, memory: ModelMemory, room: Room) -> str:
    """The number of kept states that fits, if it is configured and too large; else nothing."""
    if not memory.checkpoints:
        return ""
    left = room.usable_bytes - room.reserve_bytes - memory.beside_cache + memory.checkpoints
    fitting = (left - _least_cache(sizes, memory)) // memory.checkpoint
    configured = sizes.num_checkpoints or 0
    return f"; state_checkpoints of at most {fitting} fits" if 0 <= fitting < configured else ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"


def free_memory_bytes(device: torch.device) -> int:
    """Memory that can be allocated on the device now.

    On a CPU also bounded by what the control group allows.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_free_bytes(), _control_group_free_bytes())


def _machine_free_bytes() -> int:
    """What the kernel would give without swapping."""
    lines = (line.split() for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    kibibytes = {name: value for name, value, *_ in lines}
    return int(kibibytes["MemAvailable:"]) * 1024


def _control_group_free_bytes() -> int:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        current = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    if limit == "max":
        return 1 << 62
    # Page cache that nobody used lately is given back before anything is killed.
    return max(0, int(limit) - current + int(statistics.get("inactive_file", 0)))
