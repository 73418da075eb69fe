"""How many users GPUs hold, and how fast.

Arithmetic on a model's sizes and on rates that our own steps reached.

Owns the model. A step reads the weights (or multiplies by them, whichever takes longer) and the
caches of the rows that are being written, launches the short kernels of each layer, and ranks
exchange two all-reduces a layer. Pipeline stages take a part of the rows each, one after the other;
what goes from stage to stage is not counted. Prompts take their share of the time. Users write,
read the answer, think, and come again; so many are active as a balance of both leaves. Where sizes
come from is `command`'s business, how near all of this is to measurements docs/operations.md's.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

_MIB = 1 << 20
# All of H200s, 2026-11-21, models of dummy weights (`benchmarks.plan_check` compares).
# Short kernels and launches of a layer: what a step of one row of 8B in bf16 took beyond reading
# (4.09 ms of 3.53).
_LAYER_S = 17.4e-6
# Of the copy bandwidth, by which decodes read caches: 32 rows of 8,000 tokens.
_CACHE_SHARE = 0.93
_MOST_BUSY = 0.98
_LONGEST_ANSWER_S = 1e5
_HALVINGS = 100


class Exchange(NamedTuple):
    """The time of an all-reduce: seconds of the shortest one, and for each byte."""

    latency_s: float
    byte_s: float


# Latencies: steps of one row of 8B in bf16 less those of one card, by two sums a layer (two ranks
# 2026-11-22, four 272dfcd). Bytes: of two ranks what steps of 8,192 tokens of 8B took beyond their
# products, part of whose sums run beside products; of four what steps of 256 rows of 70B took
# beyond the same kernels without a word (2026-11-22), which is what NCCL's sums of 64 MiB take for
# each byte. Eight ranks were not measured: latency a fifth above four's, bytes as a ring sends
# them.
_EXCHANGE = {
    1: Exchange(0.0, 0.0),
    2: Exchange(2.8e-6, 2.5e-12),
    4: Exchange(3.6e-6, 4.8e-12),
    8: Exchange(4.4e-6, 6.8e-12),
}


class Gpu(NamedTuple):
    """A card, as it was measured."""

    memory_bytes: int
    # Read and written.
    copy_bytes_per_s: float
    # Of bf16, large products.
    flops_per_s: float


GPUS = {
    "h200": Gpu(143_771 * _MIB, 4.27e12, 6.87e14),
    # Not measured: the processor is an H200's.
    "h100": Gpu(81_559 * _MIB, 3.0e12, 6.87e14),
}


class Products(NamedTuple):
    """How products by one kind of weights use a card.

    Shares of its copy bandwidth and of its matrix rate.
    """

    # Of one row.
    read: float
    # Of 256 rows.
    decode: float
    # Of prompts, attention included.
    prompt: float


_PLAIN = Products(1.0, 0.84, 0.82)
# By how weights are quantized. Reading: single of 8B; decode: products of 256 rows; prompt:
# prefill8k of 8B. INT8 and INT4 in many rows are taken for what they are turned into, NF4, which
# was not measured in steps, for INT4 as it was before its kernel of one row.
PRODUCTS = {
    "off": _PLAIN,
    "int8": _PLAIN._replace(read=0.96),
    "fp8": Products(0.98, 1.58, 1.24),
    "int4": _PLAIN._replace(read=0.72),
    "nf4": _PLAIN._replace(read=0.56),
}


class RankSizes(NamedTuple):
    """What one of `tp` ranks has of a model (`headrace_backend.worker.start_up.plan_sizes`).

    Of several pipeline stages, what one rank of each has together; rows and tokens are those that
    the stage with the least room holds.
    """

    tp: int
    num_layers: int
    # Bytes that one token adds to an all-reduce.
    token_bytes: int
    read_bytes: int
    multiplied: int
    kv_token_bytes: int
    kv_tokens: int
    # Rows of a step.
    max_num_seqs: int
    products: Products = _PLAIN
    # Pipeline stages.
    pp: int = 1
    # Of `read_bytes`, all experts' of all layers, and the share of a layer's experts that compute
    # one token.
    expert_bytes: int = 0
    expert_share: float = 0.0
    # Window of each cache group, in which `kv_tokens` and `kv_token_bytes` count; 0: it keeps whole
    # contexts.
    kv_windows: tuple[int, ...] = (0,)
    # States that each row has in recurrent layers.
    row_state_bytes: int = 0

    def held_tokens(self, context: float) -> float:
        """Returns the tokens of all cache groups that a sequence of such a length holds."""
        return sum(min(context, window or context) for window in self.kv_windows)

    def read_by(self, tokens: float) -> float:
        """Returns the bytes of weights that a step of so many tokens reads.

        Of the experts it reads those that it is expected to hit, if each token chose any with equal
        odds.
        """
        missed: float = (1.0 - self.expert_share) ** tokens
        return self.read_bytes - self.expert_bytes * missed


class Demand(NamedTuple):
    """Users in a closed loop, and the lengths of what they send and get, in tokens."""

    users: int
    prompt: int
    output: int
    think_s: float
    # Of each prompt what the prefix cache holds.
    cached: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What one engine achieves under a demand."""

    # Sequences that run at once: rows of a step, each of which the cache holds whole.
    rows_held: int
    # Sequences that are being written at a time, on average.
    active: float
    itl_ms: float
    answer_s: float
    # Prompts alone, or rows beyond those held, are more than it can do: users wait for each other.
    is_overloaded: bool
    # Of the time what goes to prompts.
    prompt_share: float


def exchange_s(sizes: RankSizes, tokens: float) -> float:
    """Returns the seconds of one all-reduce of `tokens` rows over `sizes.tp` ranks.

    Numbers of ranks that are not in the table use the next larger entry.
    """
    found = next(exchange for ranks, exchange in _EXCHANGE.items() if ranks >= sizes.tp)
    return found.latency_s + tokens * sizes.token_bytes * found.byte_s


def step_s(sizes: RankSizes, gpu: Gpu, rows: float, context: float) -> float:
    """Returns the seconds in which `rows` rows, each behind `context` tokens, get a token each.

    Several pipeline stages compute a part of the rows each at a time.
    """
    rows /= sizes.pp
    reading_s = sizes.read_by(rows) / (gpu.copy_bytes_per_s * sizes.products.read)
    products_s = 2 * sizes.multiplied * rows / (gpu.flops_per_s * sizes.products.decode)
    # States are read and written.
    row_bytes = sizes.held_tokens(context) * sizes.kv_token_bytes + 2 * sizes.row_state_bytes
    caches_s = rows * row_bytes / (gpu.copy_bytes_per_s * _CACHE_SHARE)
    layer_s = _LAYER_S + 2 * exchange_s(sizes, rows)
    return max(reading_s, products_s) + caches_s + sizes.num_layers * layer_s


def predict(sizes: RankSizes, gpu: Gpu, demand: Demand) -> Prediction:
    """Returns the state in which one engine and all of the users are in balance."""
    held = min(int(sizes.kv_tokens // sizes.held_tokens(demand.prompt + demand.output)), sizes.max_num_seqs)
    low, high = 0.0, _LONGEST_ANSWER_S
    for _ in range(_HALVINGS):
        answer_s = (low + high) / 2
        # Answers that take longer come less often, and the longer they are assumed to take the less
        # there is to do.
        if _answer_s(sizes, gpu, demand, held, answer_s) > answer_s:
            low = answer_s
        else:
            high = answer_s
    active = _active(demand, high)
    rows = min(active, held)
    busy = _busy(sizes, gpu, demand, high)
    itl_s = step_s(sizes, gpu, rows, demand.prompt + demand.output / 2) / (1 - min(busy, _MOST_BUSY))
    return Prediction(
        held, active, itl_s * 1e3, high, is_overloaded=busy > _MOST_BUSY or active > held, prompt_share=busy
    )


def _active(demand: Demand, answer_s: float) -> float:
    return demand.users * answer_s / (answer_s + demand.think_s)


def _busy(sizes: RankSizes, gpu: Gpu, demand: Demand, answer_s: float) -> float:
    """Returns the share of the time that goes to prompts."""
    prompts_per_s = demand.users / (answer_s + demand.think_s)
    return prompts_per_s * prompt_s(sizes, gpu, demand.prompt - demand.cached) / sizes.pp


def prompt_s(sizes: RankSizes, gpu: Gpu, tokens: float) -> float:
    """Returns the seconds of a prompt among others, which share the latencies of their steps."""
    products_s = 2 * sizes.multiplied * tokens / (gpu.flops_per_s * sizes.products.prompt)
    sums_s = 2 * sizes.num_layers * (exchange_s(sizes, tokens) - exchange_s(sizes, 0))
    return products_s + sums_s


def _answer_s(sizes: RankSizes, gpu: Gpu, demand: Demand, held: int, assumed_s: float) -> float:
    """How long an answer takes if answers take as long as assumed.

    Rows beyond those held wait for their turn.
    """
    active = _active(demand, assumed_s)
    rows = max(min(active, held), 1e-9)
    step = step_s(sizes, gpu, rows, demand.prompt + demand.output / 2)
    turns = max(active / rows, 1.0)
    return turns * demand.output * step / (1 - min(_busy(sizes, gpu, demand, assumed_s), _MOST_BUSY)) + prompt_s(
        sizes, gpu, demand.prompt - demand.cached
    )
