"""Cases of the elementwise kernels at the sizes of an 8B Llama.

They are norms, rotation with cache write, SwiGLU, embedding, rotations, a step's inputs, and copies
of blocks.

Owns the data and the count of bytes. The launch rules' alternatives are in `elementwise_launches`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headrace_kernels.attention.kv_cache import copy_blocks
from headrace_kernels.attention.rope import rope_rows
from headrace_kernels.attention.rope_frequencies import default_frequencies, rope_table
from headrace_kernels.attention.rope_kv import rope_and_write_kv
from headrace_kernels.embedding import embedding
from headrace_kernels.rms_norm import add_rms_norm, rms_norm
from headrace_kernels.step_inputs import build_step_inputs, scatter_int32, store_last_tokens
from headrace_kernels.swiglu import swiglu

HIDDEN, FFN, VOCABULARY = 4096, 14336, 128_256
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
EPS = 1e-5
# Decode at one row, a full batch, a chunk of a prompt.
TOKENS = (1, 8, 64, 256, 2048, 8192)
Case = tuple[Callable[[], object], int, int]
Cases = Iterator[tuple[str, Callable[[], Case]]]


def randn(*size: int) -> Tensor:
    """Gaussian numbers in bf16."""
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def launch_case(run: Callable[[], object], num_bytes: int) -> Case:
    """A launch whose result stays alive, so that a case's copies write to memory of their own."""
    kept: list[object] = [None]

    def launch() -> None:
        kept[0] = run()

    return launch, num_bytes, 0


def rms_norm_case(num_tokens: int) -> Case:
    """Reads and writes the rows."""
    x, weight = randn(num_tokens, HIDDEN), randn(HIDDEN)
    return launch_case(lambda: rms_norm(x, weight, EPS), 2 * (2 * x.numel() + HIDDEN))


def add_rms_norm_case(num_tokens: int) -> Case:
    """Reads rows and residual stream, writes the stream and the norm."""
    x, residual, weight = randn(num_tokens, HIDDEN), randn(num_tokens, HIDDEN), randn(HIDDEN)
    return launch_case(lambda: add_rms_norm(x, residual, weight, EPS), 2 * (4 * x.numel() + HIDDEN))


def swiglu_case(num_tokens: int) -> Case:
    """Reads two halves, writes one."""
    gate_up = randn(num_tokens, 2 * FFN)
    return launch_case(lambda: swiglu(gate_up), 3 * gate_up.numel())


def rope_kv_case(num_tokens: int, normed: bool = False) -> Case:
    """Reads the projection, the rotations and the slots, writes all heads once.

    The slots lie in blocks of a shuffled cache.
    """
    qkv = randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    rotations = rope_rows(_table(), torch.arange(num_tokens, device="cuda"))
    num_blocks = 2 * -(-num_tokens // BLOCK_SIZE)
    kv_cache = torch.zeros(num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    starts = torch.randperm(num_blocks, device="cuda")[:, None] * BLOCK_SIZE
    slots = (starts + torch.arange(BLOCK_SIZE, device="cuda")).flatten()[:num_tokens].contiguous()
    query_norm, key_norm = (randn(HEAD_DIM), randn(HEAD_DIM)) if normed else (None, None)
    num_bytes = 2 * 2 * qkv.numel() + 4 * 2 * rotations[:, 0].numel() + 8 * num_tokens
    return launch_case(
        lambda: rope_and_write_kv(qkv, rotations, kv_cache, slots, HEADS, query_norm, key_norm, EPS), num_bytes
    )


def embedding_case(num_tokens: int) -> Case:
    """Reads and writes the tokens' rows."""
    weight = _embedding_table()
    tokens = torch.randint(0, VOCABULARY, (num_tokens,), device="cuda")
    return launch_case(lambda: embedding(tokens, weight), 2 * 2 * num_tokens * HIDDEN)


@functools.cache
def _embedding_table() -> Tensor:
    # One for all copies of the case, whose tokens differ: it is 20 times the largest cache.
    return randn(VOCABULARY, HIDDEN)


def rope_rows_case(num_tokens: int) -> Case:
    """Reads two numbers a plane and writes three."""
    table, positions = _table(), torch.randint(0, 8192, (num_tokens,), device="cuda")
    return launch_case(lambda: rope_rows(table, positions), 5 * 4 * num_tokens * HEAD_DIM // 2)


def _table() -> Tensor:
    return rope_table(default_frequencies(HEAD_DIM, 500_000.0), 8192).cuda()


def build_step_inputs_case(num_tokens: int) -> Case:
    """Every token belongs to a row of its own, up to 512 rows, and takes the row's last token."""
    entries = torch.arange(num_tokens, device="cuda", dtype=torch.int32) % 512
    rows = torch.randperm(512, device="cuda").int()
    positions = torch.randint(0, 8192, (num_tokens,), device="cuda", dtype=torch.int32)
    last_tokens = torch.randint(0, VOCABULARY, (513,), device="cuda", dtype=torch.int32)
    tables = torch.randint(0, 10_000, (1, 513, 8192 // BLOCK_SIZE), device="cuda", dtype=torch.int32)
    ids_out, positions_out, slots = torch.empty(3, num_tokens, device="cuda", dtype=torch.int64)
    outputs = (ids_out, positions_out, slots[None])
    ids = torch.full_like(entries, -1)
    columns = (ids, entries, positions, rows, last_tokens, tables)
    return launch_case(lambda: build_step_inputs(*columns, BLOCK_SIZE, *outputs), (3 * 4 + 3 * 4 + 3 * 8) * num_tokens)


def tokens() -> Cases:
    """The operations of a step and of a layer, over the number of tokens."""
    makers = {
        "rms_norm": rms_norm_case,
        "add_rms_norm": add_rms_norm_case,
        "swiglu": swiglu_case,
        "rope_kv": rope_kv_case,
        "rope_kv normed": lambda num_tokens: rope_kv_case(num_tokens, normed=True),
        "embedding": embedding_case,
        "rope_rows": rope_rows_case,
        "build_step_inputs": build_step_inputs_case,
    }
    for name, make in makers.items():
        for num_tokens in TOKENS:
            yield f"{name} {num_tokens}", lambda make=make, num_tokens=num_tokens: make(num_tokens)


def copies_of_blocks() -> Cases:
    """One layer's copies."""
    for num_copies in (1, 8, 64):
        yield f"{num_copies}", lambda num_copies=num_copies: _copy_case(num_copies)


def _copy_case(num_copies: int) -> Case:
    kv_cache = randn(4 * num_copies, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    sources, targets = torch.randperm(4 * num_copies, device="cuda")[: 2 * num_copies].view(2, -1)
    return launch_case(lambda: copy_blocks([kv_cache], sources, targets), 2 * 2 * kv_cache[0].numel() * num_copies)


def staged_values() -> Cases:
    """What a step with admissions writes into the rows' state.

    It is block tables, and the tokens just drawn.
    """
    for num_values in (64, 4096):
        yield f"scatter_int32 {num_values}", lambda num_values=num_values: _scatter_case(num_values)
    yield "store_last_tokens 256", _last_tokens_case


def _scatter_case(num_values: int) -> Case:
    target = torch.zeros(513 * 512, device="cuda", dtype=torch.int32)
    places = torch.randperm(target.numel(), device="cuda")[:num_values]
    values = torch.arange(num_values, device="cuda", dtype=torch.int32)
    return launch_case(lambda: scatter_int32(target, places, values), 16 * num_values)


def _last_tokens_case() -> Case:
    last_tokens = torch.zeros(513, device="cuda", dtype=torch.int32)
    rows = torch.randperm(512, device="cuda")[:256].int()
    sampled = torch.randint(0, VOCABULARY, (256,), device="cuda")
    return launch_case(lambda: store_last_tokens(last_tokens, rows, sampled), 16 * 256)
