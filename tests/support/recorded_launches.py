"""What a card of sm_90 would launch, recorded on a machine without one.

The record has every kernel of ours with the key by which Triton compiles its versions, and every
operation of torch's with all that a library may look at.

    python -m tests.support.recorded_launches MODEL

runs start-up's synthetic steps on CPU tensors by the rules of an H200 and prints a line of JSON for
each way of warming up, a `Record`. MODEL is the JSON of a `Model`. Nothing is launched or compiled,
so kernels leave their outputs as they were: only what would be launched counts. A process of its
own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from tests.support.model_builds import load_model
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from headrace_backend.config import EngineConfig
from headrace_backend.models import causal_lm
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.parallel.collectives import Collectives, PieceRule
from headrace_backend.weights.placement import Shard
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_backend.worker.start_up.synthetic_steps import BlockPool
from headrace_backend.worker.start_up.warm_up import gpu_steps, warm_up
from headrace_backend.worker.step.buffers import StepLimits
from headrace_backend.worker.step.gpu_runner import GpuRunner
from headrace_backend.worker.step.kv_caches import allocate_kv_caches, kv_type
from headrace_backend.worker.step.runner import run_steps
from headrace_backend.worker.step.shape import AttentionSizes, captured_shapes
from headrace_kernels import card, triton_runtime
from headrace_kernels.attention import paged
from headrace_kernels.linear import gemm_fp8
from headrace_kernels.rounded_tokens import RoundedTokens
from headrace_kernels.weight_formats.quantized_weight import QuantizedWeight
from headrace_model_folder import ModelFolder

CPU = torch.device("cpu")
_NUM_BLOCKS, _BLOCK_SIZE = 8, 16
# Deep enough for contexts that are gathered.
_MAX_MODEL_LEN = 6000
# A vector of 16 bytes is the most that anything here asks of an address.
_ALIGNMENT = 16
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and how a server is to run it."""

    path: str
    load: str = "dummy"
    quantize: str = "off"
    quantize_head: str = "off"
    kv_dtype: str = "auto"
    # This one of two ranks; None: there is one. The other is taken to be like it.
    rank: int | None = None

    @property
    def folder(self) -> ModelFolder:
        """Its own."""
        return ModelFolder.open(self.path, require_weights=self.load == "folder")

    @property
    def max_model_len(self) -> int:
        """The model's context in tokens, if it is not very long."""
        return min(_MAX_MODEL_LEN, self.folder.config.max_position_embeddings)

    def config(self) -> EngineConfig:
        """Sizes small enough for a CPU, on both sides of every rule."""
        sizes = {"max_num_seqs": 33, "max_num_batched_tokens": 600, "block_size": _BLOCK_SIZE}
        return EngineConfig.model_validate({"model": self.path, "device": "cpu", "kv_dtype": self.kv_dtype, **sizes})


class Launches(TorchDispatchMode):
    """Inside, takes note of what is launched, each kind once, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def add(self, name: str, *about: object) -> None:
        self.counts[" ".join((name, *map(str, about)))] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.add(str(function), *map(_operand, args), _operand(kwargs))
        if function is torch.ops.aten.linear.default:
            # Nobody reads the numbers of a product, which would take two thirds of all time here.
            tokens, weight = args[:2]
            return tokens.new_zeros((*tokens.shape[:-1], weight.shape[0]))
        result = function(*args, **(kwargs or {}))
        # What kernels would have filled: tokens are places in tables later on.
        return result.zero_() if function in _EMPTY else result


def _operand(value: object) -> str:
    """Type, sizes, strides and alignment of tensors, whatever they are in; others' values."""
    if isinstance(value, torch.Tensor):
        alignment = math.gcd(value.data_ptr(), _ALIGNMENT)
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}@{alignment}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_operand, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_operand(each)}' for key, each in value.items())}}}"
    return str(value)


class _Card:
    """What Triton asks of a driver to tell versions of a kernel apart."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class _Alike(Collectives):
    """A rank whose fellow has the very same tensors. Notes what is sent."""

    world_size, device = 2, CPU
    # Long steps are in two pieces, and shorter ones behind a deep context whole, as with cards.
    piece_rule = PieceRule(520 * 256 * 2, 520 * 256 * 2, 128)

    def __init__(self, rank: int, launches: Launches) -> None:
        self.rank, self._launches = rank, launches

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self._launches.add("all_reduce", _operand(partial))
        return partial

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        self._launches.add("all_gather", _operand(part))
        return torch.stack([part, part])


@contextlib.contextmanager
def on_a_card(launches: Launches) -> Iterator[None]:
    """Inside, rules are an H200's and kernels are noted."""

    def noted(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        *_, binder = self.device_caches[0]
        _, specialization, options = binder(*args, **kwargs)
        launches.add(self.fn.__qualname__, specialization, sorted(options.items()))

    def scaled(tokens: RoundedTokens, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        operands = (tokens.numbers, tokens.scales, weight.packed, weight.scales, bias)
        launches.add("_scaled_mm", *map(_operand, operands))
        return torch.empty(len(tokens), weight.num_outputs, dtype=weight.dtype)

    triton.runtime.driver.set_active(_Card())
    with contextlib.ExitStack() as stack:
        enter: Callable[[Any], Any] = stack.enter_context
        for ability in ("warpgroup_products", "warpgroup_instructions", "copy_engine", "fp8_products"):
            enter(mock.patch.object(card, f"has_{ability}", lambda device: True))
        enter(mock.patch.object(card, "shared_bytes", lambda device: 232_448))
        enter(mock.patch.object(card, "multiprocessors", lambda device: 132))
        enter(mock.patch.object(paged, "INTERPRETED", True))
        enter(mock.patch.object(gemm_fp8, "scaled_linear", scaled))
        enter(mock.patch.dict(triton_runtime._state, forced=True))
        enter(mock.patch.object(JITFunction, "run", noted))
        enter(torch.inference_mode())
        enter(launches)
        yield


def loaded(model: Model, launches: Launches) -> CausalLM:
    """With its weights as a card has them, outputs of an input together."""
    folder = model.folder
    schemes = Schemes.named(model.quantize, 128, model.quantize_head)
    shard = Shard() if model.rank is None else Shard(model.rank, 2, _Alike(model.rank, launches))
    about = (model.load, 0, lambda *_: None, model.max_model_len, schemes.layers, shard, schemes.head)
    ours = load_model(folder, folder.config, torch.bfloat16, CPU, *about)  # type: ignore[arg-type]
    for parameter in ours.parameters():
        parameter.data = parameter.data.contiguous()
    return ours


class Server:
    """A model behind a runner."""

    def __init__(self, model: Model, launches: Launches) -> None:
        self.sizes, self.causal_lm = WorkerSizes.of(model.config(), model.max_model_len), loaded(model, launches)
        ours = self.causal_lm
        shape = (_NUM_BLOCKS, 2, ours.num_kv_heads, _BLOCK_SIZE, ours.head_dim)
        self.kv_caches = allocate_kv_caches(ours.num_layers, shape, kv_type(model.kv_dtype, ours.dtype), CPU)
        limits = StepLimits(self.sizes.max_num_seqs, self.sizes.max_num_batched_tokens, self.sizes.max_model_len)
        sizes = AttentionSizes.of(ours.num_heads, self.kv_caches[0], ours.dtype)
        sampler = Sampler(limits.max_num_seqs, ours.vocab_size, CPU)
        shapes = captured_shapes((1, 2, 4, 8, 16, 32), (64, 128), limits.max_num_seqs, sizes)
        self.runner = GpuRunner(ours, sampler, self.kv_caches, limits, sizes, shapes)
        # Of each pass through the model, the layers whose attention it took, by their places.
        self.passes: list[list[int]] = []
        for place, layer in enumerate(ours.model.layers):
            layer.self_attn.attended = functools.partial(self._attended, place, layer.self_attn.attended)
        ours.model.register_forward_pre_hook(lambda *_: self.passes.append([]))

    def _attended(self, place: int, attended: Any, qkv: Any, rotations: Any, kv_cache: Any, metadata: Any) -> Any:
        assert kv_cache is self.kv_caches[place], "another layer's cache"
        self.passes[-1].append(place)
        return attended(qkv, rotations, kv_cache, metadata)

    def whole(self) -> None:
        """All of warm-up's steps, through all layers."""
        pool = BlockPool(_NUM_BLOCKS, _BLOCK_SIZE)
        run_steps(self.runner, list(gpu_steps(self.sizes, pool)), lambda done: None)

    def shallow(self) -> None:
        """Launches through representative layers alone."""
        with self.causal_lm.representative_layers():
            self.whole()

    def ends(self) -> None:
        """Launches through the first layer and the last: too little where layers differ."""
        with mock.patch.object(causal_lm, "representative_places", lambda kinds, together: [0, len(kinds) - 1]):
            self.shallow()

    def warm(self) -> None:
        """Warm-up as start-up has it."""
        about = (self.runner, self.causal_lm, self.kv_caches, self.sizes)
        warm_up(*about, lambda *_: None)


class Record(NamedTuple):
    """What came of a way of warming up."""

    # The name of one of `Server`'s.
    way: str
    # How often each was launched, by all that tells it from others.
    launches: dict[str, int]
    # The layers of each pass through the model, by their places.
    passes: list[list[int]]


def recorded(model: Model) -> Iterator[Record]:
    """One of each way."""
    for way in (Server.whole, Server.shallow, Server.ends, Server.warm):
        launches = Launches()
        # Each a new one: what a sampler keeps grows with its first steps.
        server = Server(model, launches)
        with on_a_card(launches):
            way(server)
        yield Record(way.__name__, dict(launches.counts), server.passes)


if __name__ == "__main__":
    for record in recorded(Model(**json.loads(sys.argv[1]))):
        print(json.dumps(record._asdict()))
