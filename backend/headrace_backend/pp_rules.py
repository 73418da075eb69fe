"""Which layers a pipeline stage has: what follows from `--pp` before torch is loaded.

Owns the division of a model's layers over stages, and the refusal of more stages than layers that
keep keys and values: each stage has one, as the blocks that the engine hands out must lie in all of
them. Supervisor, backend and worker all ask here, and every rank comes to the same division. What a
rank has of its stage's layers is `tp_rules`'.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from headrace_backend.config import EngineConfig
from headrace_model_folder import ModelConfig
from headrace_model_folder.description import Attention, Layer, ModelDescription

# Of one weight, where it is quantized while it is read; others have the checkpoint's.
_BITS = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4}
_PLAIN_BITS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One of the stages that compute a model's layers one after the other."""

    index: int = 0
    count: int = 1
    # Its first layer and the one behind its last, by their places in the model; None: the end.
    first_layer: int = 0
    end_layer: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether it turns tokens into vectors."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer, and draws tokens."""
        return self.index == self.count - 1


# The stage of a model that has no others.
WHOLE = Stage()


class _Load(NamedTuple):
    """What stages so far have of the weights, in bits; the smaller of two is the better division.

    The largest stage decides whether a model fits, and how long a full pipeline takes.
    """

    largest: int = 0
    # Of all stages: among divisions with the same largest stage the most even one is taken.
    squares: int = 0

    def beside(self, bits: int) -> _Load:
        """These stages and one more."""
        return _Load(max(self.largest, bits), self.squares + bits * bits)


def unsuitable_pp(config: EngineConfig, model: ModelConfig) -> str | None:
    """Explains why `config.pp` stages can't share the model's layers; returns None if they can."""
    if config.pp > 1 and (model.description.shares_keys or model.description.per_layer_embedding is not None):
        return (
            f"pp is {config.pp}, and layers read other layers' keys or have inputs of tokens of their own "
            f"({model.architecture}), which stages do not hand on: pp 1 works"
        )
    most = len(model.description.kv_attentions)
    if config.pp <= most:
        return None
    has = f"the model has {most} layers"
    if model.description.recurrent_layers:
        has = f"each stage needs a layer with keys and values, of which the model ({model.architecture}) has {most}"
    return f"pp is {config.pp}, and {has}: pp of at most {most} works"


def stages(config: EngineConfig, model: ModelConfig) -> tuple[Stage, ...]:
    """Divides a model's layers over `config.pp` stages by weights' bits.

    Each has at least one layer that keeps keys and values. The embedding counts with the first
    stage, the output layer with the last.
    """
    described, layer_bits = model.description, [_layer_bits(layer, config, model) for layer in model.description.layers]
    table = described.vocab_size * described.hidden_size
    layer_bits[0] += table * _PLAIN_BITS
    layer_bits[-1] += table * _BITS.get(config.quantize_head, _PLAIN_BITS)
    ends = _ends(layer_bits, [isinstance(layer.attention, Attention) for layer in described.layers], config.pp)
    firsts = (0, *ends[:-1])
    return tuple(
        Stage(index, config.pp, first, end) for index, (first, end) in enumerate(zip(firsts, ends, strict=True))
    )


def stage_part(model: ModelDescription, stage: Stage) -> ModelDescription:
    """What one stage has of a model: some of its layers.

    An output layer that is tied to the embedding is loaded once more where that is another stage's.
    """
    head = model.head
    if head.tied and stage.is_last and not stage.is_first:
        head = dataclasses.replace(head, name=model.embedding.name, tied=False)
    return dataclasses.replace(model, layers=model.layers[stage.first_layer : stage.end_layer], head=head)


def _layer_bits(layer: Layer, config: EngineConfig, model: ModelConfig) -> int:
    formats = model.quantization.layers if model.quantization else {}
    plain = _BITS.get(config.quantize, _PLAIN_BITS)
    return sum(
        linear.size
        * (formats[linear.name].bits if linear.name in formats else _PLAIN_BITS if linear.keeps_dtype else plain)
        for linear in layer.linears
    )


def _ends(bits: Sequence[int], has_keys: Sequence[bool], num_stages: int) -> tuple[int, ...]:
    """The layer behind each stage's last one.

    Args:
        bits: Bits of each layer's weights.
        has_keys: Whether each layer keeps keys and values.
        num_stages: At most as many as layers that do.
    """
    sums, keys = (tuple(itertools.accumulate(column, initial=0)) for column in (bits, has_keys))

    @functools.cache
    def best(count: int, end: int) -> tuple[_Load, tuple[int, ...]]:
        """The first `count` stages, which have the layers before `end`."""
        if count == 0:
            return _Load(), ()
        # Every stage before it has a layer with keys, and so has this one.
        firsts = [first for first in range(end) if count - 1 <= keys[first] < keys[end]] if count > 1 else (0,)
        found = ((best(count - 1, first), sums[end] - sums[first]) for first in firsts)
        return min((load.beside(size), (*ends, end)) for (load, ends), size in found)

    return best(num_stages, len(bits))[1]
