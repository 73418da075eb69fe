"""Times and checks the kernels of recurrent layers, with the heads of Qwen3.5 9B in bf16.

The launch rules in `headrace_kernels.recurrence` are chosen from them. Each line has the largest
difference from the rule in fp64 beside the times, relative to the largest number.

    python -m benchmarks.sweep_recurrence check|prompts|decodes|drafts|parts [--part 0/1]
        [--limit-s 60]

With `--compile` nothing is timed: each kernel is launched once, which leaves it in Triton's cache
for a later process. `--part` takes each n-th variant, so that several processes compile at once.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.graph_timing import graph_seconds
from headrace_kernels.recurrence.chunk_kernels import ChunkTile, launch_chunks
from headrace_kernels.recurrence.convolution import causal_convolution
from headrace_kernels.recurrence.decode_kernels import launch_decodes
from headrace_kernels.recurrence.delta_net import DeltaWeights, ProjectedTokens, delta_net, delta_net_reference
from headrace_kernels.recurrence.drafted_kernels import launch_drafted
from headrace_kernels.recurrence.entries import RecurrentEntries
from headrace_kernels.recurrence.gated_delta import LENGTH_EPS, DeltaGates, DeltaHeads, gated_delta
from headrace_kernels.recurrence.gated_delta_kernels import launch_gated_delta
from headrace_kernels.recurrence.output_norm import gated_rms_norm
from headrace_kernels.recurrence.pending import RowStates, line_elements, longest_entry, states_of

_HEADS = DeltaHeads(16, 32, 128, 128)
_KERNEL = 4
_DEVICE = "cuda"
# Microseconds of a launch.
Timer: TypeAlias = Callable[[list[Callable[[], object]]], float]
# Memory of all layers' states together: several times the largest L2 cache of these GPUs.
_ROTATED_BYTES = 256 << 20


class Layer(NamedTuple):
    """One layer's numbers for a step."""

    tokens: ProjectedTokens
    weights: DeltaWeights
    states: RowStates
    entries: RecurrentEntries

    @property
    def gates(self) -> DeltaGates:
        """What decides how matrices change."""
        return DeltaGates(self.tokens.correction, self.tokens.decay, self.weights.log_decay, self.weights.decay_bias)


def layer(counts: list[int], only_decodes: bool = False, seed: int = 0, num_drafts: int = 0) -> Layer:
    """Entries of so many tokens each, behind 1,000 tokens; with drafts, all but the first are."""
    generator = torch.Generator(_DEVICE).manual_seed(seed)

    def randn(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*size, generator=generator, device=_DEVICE).to(dtype)

    count, channels, width = _HEADS.num_value_heads, _HEADS.num_channels, _HEADS.num_value_heads * _HEADS.value_dim
    sizes = (channels, width, count, count)
    tokens = ProjectedTokens(*randn(sum(counts), sum(sizes)).split(sizes, dim=1))
    log_decay, bias = randn(2, count, dtype=torch.float32)
    weights = DeltaWeights(randn(channels, _KERNEL) * 0.5, log_decay, bias, randn(_HEADS.value_dim), 1e-6)
    lines = randn(len(counts) + 1, line_elements(_HEADS, _KERNEL, num_drafts), dtype=torch.float32)
    states = states_of(lines, _HEADS, _KERNEL)
    if states.pending is not None:
        states.pending.bases.fill_(1000)
    ends, drafts = [1000 + each for each in counts], [each - 1 if num_drafts else 0 for each in counts]
    columns = ([0, *itertools.accumulate(counts)], ends, list(range(len(counts))), drafts)
    bounds, lengths, rows, of_drafts = (torch.tensor(column, dtype=torch.int32, device=_DEVICE) for column in columns)
    return Layer(tokens, weights, states, RecurrentEntries(bounds, lengths, rows, only_decodes, of_drafts))


def rule_in_fp64(mixed: Tensor, data: Layer) -> tuple[Tensor, Tensor]:
    """Outputs and matrices of the first entry, token by token."""
    group, keys = _HEADS.num_value_heads // _HEADS.num_key_heads, _HEADS.num_key_heads * _HEADS.key_dim
    query, key, value = mixed.double().tensor_split((keys, 2 * keys), dim=1)
    query, key = (part.unflatten(1, (_HEADS.num_key_heads, _HEADS.key_dim)) for part in (query, key))
    query, key = (
        (part / (part.square().sum(-1, keepdim=True) + LENGTH_EPS).sqrt()).repeat_interleave(group, 1)
        for part in (query, key)
    )
    query, value = query * _HEADS.key_dim**-0.5, value.unflatten(1, (_HEADS.num_value_heads, _HEADS.value_dim))
    beta = data.gates.correction.double().sigmoid()[..., None]
    softplus = torch.nn.functional.softplus(data.gates.decay.double() + data.gates.decay_bias.double())
    shrink = (-data.gates.log_decay.double().exp() * softplus).exp()[..., None, None]
    state, outputs = data.states.matrices[0].double(), []
    for token in range(int(data.entries.query_start_loc[1])):
        state = state * shrink[token]
        update = beta[token] * (value[token] - torch.einsum("hkv,hk->hv", state, key[token]))
        state = state + key[token, :, :, None] * update[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, query[token]))
    return torch.stack(outputs), state


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def _microseconds(launches: list[Callable[[], object]]) -> float:
    """Microseconds of one launch: the median over replays of a graph that has all of them."""
    return 1e6 * statistics.median(graph_seconds(launches))


def _compiled(launches: list[Callable[[], object]]) -> float:
    """Launches the first, and times nothing."""
    launches[0]()
    torch.cuda.synchronize()
    return math.nan


def _prompt_tiles() -> Iterator[ChunkTile]:
    """Tiles within chunks, then across, each beside the rule's other half."""
    yield from (ChunkTile(chunk=chunk, within_warps=warps) for chunk in (64, 32) for warps in (4, 8))
    for columns, warps, stages in itertools.product((16, 32, 64, 128), (4, 8), (2, 3)):
        if warps * 16 <= 2 * columns or warps == 4:
            yield ChunkTile(columns=columns, across_warps=warps, stages=stages)
    yield from (ChunkTile(chunk=32, columns=columns, stages=3) for columns in (16, 32))


def _chunks(data: Layer, mixed: Tensor, tile: ChunkTile) -> tuple[Callable[[], None], Tensor]:
    out = mixed.new_empty(len(mixed), _HEADS.num_value_heads, _HEADS.value_dim)
    operands = (mixed, data.gates, data.states.matrices, data.entries, _HEADS, out, LENGTH_EPS)
    return lambda: launch_chunks(*operands, tile=tile), out


def check(part: slice, timed: Timer) -> Iterator[str]:
    """Outputs and states of the kernels against the rule in fp64: 500 tokens of one entry."""
    begun = layer([500])
    mixed = causal_convolution(begun.tokens.mixed, begun.weights.convolution, begun.states.tails, begun.entries)
    expected, state = rule_in_fp64(mixed, begun)
    for tile in [None, ChunkTile(), ChunkTile(chunk=32)][part]:
        fresh = layer([500])
        if tile is None:
            out = mixed.new_empty(len(mixed), _HEADS.num_value_heads, _HEADS.value_dim)
            operands = (mixed, fresh.gates, fresh.states.matrices, fresh.entries, _HEADS, out, LENGTH_EPS)
            launch_gated_delta(*operands, least=1, most=500)
        else:
            run, out = _chunks(fresh, mixed, tile)
            run()
        error, of_state = _error(out, expected), _error(fresh.states.matrices[0], state)
        yield f"{tile or 'token by token'}: output off by {error:.1e}, state by {of_state:.1e}"


def prompts(part: slice, timed: Timer) -> Iterator[str]:
    """Times of both launches of chunks, by tile; last token by token."""
    for tile in list(_prompt_tiles())[part]:
        times = []
        for counts in ([8192], [1024] * 8):
            data = layer(counts)
            try:
                times.append(f"{timed([_chunks(data, data.tokens.mixed.contiguous(), tile)[0]]):.0f} us")
            except Exception as error:
                # Most often more shared memory than the card has.
                times.append(type(error).__name__)
        yield f"{tile}: 8192 x 1, 1024 x 8: {', '.join(times)}"


def decodes(part: slice, timed: Timer) -> Iterator[str]:
    """Decodes in one launch by warps, and one operation after another, against copies."""
    source = torch.empty(256 << 20, dtype=torch.int8, device=_DEVICE)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / timed([lambda: target.copy_(source)] * 4) * 1e6
    yield f"copies: {bandwidth / 1e12:.2f} TB/s"
    for rows in (256, 64, 8, 1):
        copies = max(2, min(64, _ROTATED_BYTES // (rows * 2 << 20)))
        layers = [layer([1] * rows, True, seed) for seed in range(copies)]
        moved = 2 * rows * layers[0].states.matrices[0].nbytes
        for warps in [2, 4, 8][part]:
            us = timed([_decode(data, warps) for data in layers])
            yield f"{rows} rows, {warps} warps: {us:.1f} us, {moved / us * 1e6 / bandwidth:.0%} of copies"
        yield f"{rows} rows, one operation after another: {timed([_apart(data) for data in layers]):.1f} us"


def _decode(data: Layer, warps: int) -> Callable[[], object]:
    out = data.tokens.gate.new_empty(data.tokens.gate.shape)
    return lambda: launch_decodes(*data, _HEADS, out, LENGTH_EPS, num_warps=warps)


def drafts(part: slice, timed: Timer) -> Iterator[str]:
    """Steps that verify drafts, by their number, what is pending and warps, beside plain decodes.

    Each launch has the bases set before it, which an empty launch of them tells the time of.
    """
    for rows, num_drafts in itertools.product((1, 8, 64, 256), (4, 8)):
        copies = max(2, min(64, _ROTATED_BYTES // (rows * 2 << 20)))
        plain = [layer([1] * rows, True, seed) for seed in range(copies)]
        yield f"{rows} rows: a token each, nothing drafted: {timed([_together(data) for data in plain]):.1f} us"
        for count, pending in ((1, 0), (1 + num_drafts, 0), (1 + num_drafts, num_drafts))[part]:
            layers = [layer([count] * rows, True, seed, num_drafts) for seed in range(copies)]
            name = f"{rows} rows, {num_drafts} drafts at most: {count} tokens, {pending} pending"
            yield f"{name}: bases {timed([_begin(data, pending) for data in layers]):.1f} us"
            for warps in (4, 8):
                us = timed([run for data in layers for run in (_begin(data, pending), _verify(data, warps))])
                yield f"{name}, {warps} warps: rule, norm and gate {2 * us:.1f} us with bases"
            us = timed([run for data in layers for run in (_begin(data, pending), _together(data))])
            yield f"{name}: all {2 * us:.1f} us with bases"


def _begin(data: Layer, pending: int) -> Callable[[], object]:
    kept = data.states.pending
    assert kept is not None, "tokens are drafted"
    return lambda: kept.bases.fill_(1000 - pending)


def _verify(data: Layer, warps: int) -> Callable[[], object]:
    tokens, weights, states, entries = data
    assert states.pending is not None, "tokens are drafted"
    mixed, out = tokens.mixed.contiguous(), tokens.gate.new_empty(tokens.gate.shape)
    most = longest_entry(states.pending.num_drafts)
    return lambda: launch_drafted(
        mixed, tokens, weights, states, entries, _HEADS, out, LENGTH_EPS, most, num_warps=warps
    )


def _apart(data: Layer) -> Callable[[], object]:
    return lambda: delta_net_reference(*data, _HEADS)


def _together(data: Layer) -> Callable[[], object]:
    return lambda: delta_net(*data, _HEADS)


def parts(part: slice, timed: Timer) -> Iterator[str]:
    """What a prompt's step is made of, and a mixed step, beside copies of as many bytes."""
    data = layer([8192])
    mixed = data.tokens.mixed.contiguous()
    gate = data.tokens.gate.unflatten(1, (_HEADS.num_value_heads, _HEADS.value_dim))
    out = gate.contiguous()
    runs: dict[str, Callable[[], object]] = {
        "convolution": lambda: causal_convolution(
            data.tokens.mixed, data.weights.convolution, data.states.tails, data.entries
        ),
        "a copy of its inputs": lambda: mixed.copy_(data.tokens.mixed),
        "rule": lambda: gated_delta(mixed, data.gates, data.states.matrices, data.entries, _HEADS),
        "norm and gate": lambda: gated_rms_norm(out, gate, data.weights.norm, 1e-6),
        "a copy of the gates": lambda: out.copy_(gate),
        "all, 8192 tokens": _together(data),
        "all, 256 decodes and 512 tokens": _together(layer([1] * 256 + [512])),
        "all, 512 tokens": _together(layer([512])),
        "all, 64 decodes in a mixed step": _together(layer([1] * 64)),
    }
    for name, run in list(runs.items())[part]:
        yield f"{name}: {timed([run]):.0f} us"


_KINDS = {each.__name__: each for each in (check, prompts, decodes, drafts, parts)}


def main() -> None:
    """Command line: one line per variant, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=_KINDS)
    parser.add_argument("--compile", action="store_true", help="launch each variant once, and time nothing")
    parser.add_argument("--part", default="0/1", help="which of how many parts of the variants")
    parser.add_argument("--limit-s", type=float, default=60)
    options = parser.parse_args()
    begin, step = map(int, options.part.split("/"))
    end = time.monotonic() + options.limit_s
    for line in _KINDS[options.kind](slice(begin, None, step), _compiled if options.compile else _microseconds):
        print(line, flush=True)
        if time.monotonic() > end:
            print("out of time")
            return


if __name__ == "__main__":
    main()
