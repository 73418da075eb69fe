"""Format of one linear layer that another tool quantized: its tensors by name, shape and type.

Owns the layouts as their formats' public descriptions say, N outputs and K inputs, G groups of
inputs, P = 32 / bits numbers in a word, lowest bits first:

    gptq      qweight [K/P, N], qzeros [G, N/P], scales [G, N], g_idx [K] (group of each input).
              Zero points are stored minus one in the first version of the format, each by itself
              or, by one tool, whole words.
    awq       qweight [K, N/8], qzeros [G, N/8], scales [G, N]; a word's nibbles are outputs 0, 2,
              4, 6, 1, 3, 5, 7 of its eight.
    packed    weight_packed [N, K/P], weight_scale [N, G], weight_zero_point [N/P, G], weight_g_idx
              [K], weight_shape [2]; numbers and zero points are stored plus half their range.
    whole     weight [N, K] int8 or e4m3, weight_scale [], [1], [N, 1], [N, G], or of blocks
              [ceil(N/128), ceil(K/128)]; weight_zero_point like the scale.

What config.json says of them is `quantization_config`'s, what the numbers are the backend's.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from headrace_model_folder.errors import InvalidModelFolder

# Outputs and inputs of a block that shares a scale.
BLOCK_SIZE = 128
# Inputs that share a scale, at least. Larger groups are as good in pieces of this.
LEAST_GROUP = 32

_FLOATS = ("F16", "BF16", "F32")
_WORDS = ("I32",)


class Layout(enum.Enum):
    """Which tensors hold a weight."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "packed"
    WHOLE = "whole"
    # Of stacked experts (`formats.mxfp4_config`), whose tensors hold all experts of a layer.
    MXFP4 = "mxfp4"


class Role(enum.Enum):
    """What a tensor is for."""

    NUMBERS = "numbers"
    SCALES = "scales"
    ZEROS = "zeros"
    # Group of each input.
    ORDER = "order"
    # Of the weight, [N, K].
    SHAPE = "shape"
    # Static scale and zero point of the inputs, one for all of them: read before the weights
    # (`input_scales`).
    INPUT_SCALE = "input scale"
    INPUT_ZERO = "input zero point"


class SourceTensor(NamedTuple):
    """One tensor of a layer."""

    role: Role
    # The layer's name and this make the tensor's.
    suffix: str
    # Any of these.
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_required: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class InputFormat:
    """How a layer's inputs are rounded: to int8 beside int8, to e4m3 beside fp8 and int4."""

    # What shares a scale: the inputs of a token, a group of those, or, static, all inputs of all
    # tokens.
    scales: Literal["token", "group", "static"]
    # Inputs of a group, the last of a token maybe fewer; 0 where there are none.
    group_size: int = 0
    # Whether there is no zero point.
    is_symmetric: bool = True
    # Static scale and zero point. Known once the file was read.
    scale: float = 0.0
    zero_point: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LayerFormat:
    """One layer's layout, with what its configuration leaves open decided."""

    layout: Layout
    number: Literal["int4", "int8", "fp8", "mxfp4"]
    scales: Literal["tensor", "channel", "group", "block"]
    # Inputs that share a scale, of groups; 0: all.
    group_size: int = 0
    is_symmetric: bool = True
    # GPTQ: zero points are stored minus one.
    is_less_one: bool = False
    # With that: one was taken from whole words, so that a zero point of 0 borrowed from its
    # neighbour.
    has_borrows: bool = False
    # Whether inputs of a group may be no neighbours: then the file says which group each is in.
    is_ordered: bool = False
    # Which order, of those that are no plain sequence: equal for layers whose inputs are in the
    # same one. Known once the file was read.
    order_digest: str = ""
    # None: inputs are multiplied as they are.
    inputs: InputFormat | None = None
    # Blocks are called weight_scale_inv by one format and weight_scale by another; both are
    # factors.
    scale_name: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return 4 if self.number in ("int4", "mxfp4") else 8

    def num_groups(self, num_inputs: int) -> int:
        """Scales of an output."""
        return (
            math.ceil(num_inputs / BLOCK_SIZE)
            if self.scales == "block"
            else num_inputs // (self.group_size or num_inputs)
        )

    def cuts(self, num_outputs: int, num_inputs: int, whole: tuple[int, int]) -> str | None:
        """Says what dealing a layer out in even parts would cut, with the sizes; None if nothing.

        Args:
            num_outputs: Number of outputs of a part.
            num_inputs: Number of inputs of a part.
            whole: Outputs and inputs of the layer.
        """
        if num_inputs < whole[1] and self.order_digest:
            return (
                f"its {whole[1]} inputs are in an order of groups (act-order), and a group's would lie on several ranks"
            )
        word = 32 // self.bits
        inputs, what = 1, "word"
        if self.scales == "block":
            inputs, what = BLOCK_SIZE, "block"
        elif self.group_size:
            inputs, what = LEAST_GROUP, "smallest group"
        elif self.layout in (Layout.GPTQ, Layout.PACKED):
            inputs = word
        has_words = self.layout in (Layout.GPTQ, Layout.AWQ) or (self.layout is Layout.PACKED and not self.is_symmetric)
        outputs = word if has_words else 1
        for part, size, unit, name, along in (
            (num_outputs, whole[0], outputs, "word", "outputs"),
            (num_inputs, whole[1], inputs, what, "inputs"),
        ):
            if part < size and part % unit:
                return f"its {size} {along} give {part} to each, which a {name} of {unit} does not divide"
        rounded = self.inputs.group_size if self.inputs else 0
        if num_inputs < whole[1] and rounded and num_inputs % rounded:
            return (
                f"its {whole[1]} inputs give {num_inputs} to each, which groups of {rounded} that are rounded together "
                "do not divide"
            )
        return None

    def check_sizes(self, layer: str, num_outputs: int, num_inputs: int) -> None:
        """Refuses a layer that can't be in this format.

        Raises:
            InvalidModelFolder: The group does not divide its inputs, or words would be cut.
        """
        if self.group_size and num_inputs % self.group_size:
            raise InvalidModelFolder(
                f"config.json: quantization_config: group size {self.group_size} does not divide the {num_inputs} "
                f"inputs of {layer}"
            )
        per_word = 32 // self.bits
        if self.layout is not Layout.WHOLE and num_inputs % per_word:
            raise InvalidModelFolder(
                f"config.json: quantization_config: {layer} has {num_inputs} inputs, which words of {per_word} numbers "
                "do not hold evenly"
            )
        if self.layout in (Layout.GPTQ, Layout.AWQ) and num_outputs % per_word:
            raise InvalidModelFolder(
                f"config.json: quantization_config: {layer} has {num_outputs} outputs, which words of {per_word} "
                "numbers do not hold evenly"
            )

    def tensors(self, num_outputs: int, num_inputs: int) -> Iterator[SourceTensor]:
        """The tensors of a layer, those that need not be there included; none of a stacked one."""
        if self.layout is Layout.MXFP4:
            return
        if self.layout in (Layout.GPTQ, Layout.AWQ):
            yield from self._gptq_and_awq(num_outputs, num_inputs)
        else:
            yield from self._compressed(num_outputs, num_inputs)

    def _gptq_and_awq(self, num_outputs: int, num_inputs: int) -> Iterator[SourceTensor]:
        per_word, groups = 32 // self.bits, self.num_groups(num_inputs)
        is_awq = self.layout is Layout.AWQ
        words = (num_inputs, num_outputs // per_word) if is_awq else (num_inputs // per_word, num_outputs)
        yield SourceTensor(Role.NUMBERS, "qweight", (words,), _WORDS)
        yield SourceTensor(Role.ZEROS, "qzeros", ((groups, num_outputs // per_word),), _WORDS)
        yield SourceTensor(Role.SCALES, "scales", ((groups, num_outputs),), _FLOATS)
        if not is_awq:
            yield SourceTensor(Role.ORDER, "g_idx", ((num_inputs,),), _WORDS, self.is_ordered)

    def _compressed(self, num_outputs: int, num_inputs: int) -> Iterator[SourceTensor]:
        per_word, is_packed = 32 // self.bits, self.layout is Layout.PACKED
        if is_packed:
            yield SourceTensor(Role.NUMBERS, "weight_packed", ((num_outputs, num_inputs // per_word),), _WORDS)
            yield SourceTensor(Role.SHAPE, "weight_shape", ((2,),), ("I64", "I32"))
        else:
            dtypes = ("F8_E4M3",) if self.number == "fp8" else ("I8",)
            yield SourceTensor(Role.NUMBERS, "weight", ((num_outputs, num_inputs),), dtypes)
        shapes = self._scale_shapes(num_outputs, num_inputs)
        yield SourceTensor(Role.SCALES, self.scale_name, shapes, _FLOATS)
        if not self.is_symmetric and is_packed:
            words = (math.ceil(num_outputs / per_word), self.num_groups(num_inputs))
            yield SourceTensor(Role.ZEROS, "weight_zero_point", (words,), _WORDS)
        elif not self.is_symmetric:
            yield SourceTensor(Role.ZEROS, "weight_zero_point", shapes, ("I8",))
        if self.is_ordered:
            yield SourceTensor(Role.ORDER, "weight_g_idx", ((num_inputs,),), _WORDS)
        if self.inputs is None or self.inputs.scales != "static":
            return
        yield SourceTensor(Role.INPUT_SCALE, "input_scale", ((), (1,), (1, 1)), _FLOATS)
        if not self.inputs.is_symmetric:
            yield SourceTensor(Role.INPUT_ZERO, "input_zero_point", ((), (1,), (1, 1)), ("I8", "I32"))

    def _scale_shapes(self, num_outputs: int, num_inputs: int) -> tuple[tuple[int, ...], ...]:
        if self.scales == "tensor":
            return (), (1,), (1, 1)
        if self.scales == "block":
            return ((math.ceil(num_outputs / BLOCK_SIZE), math.ceil(num_inputs / BLOCK_SIZE)),)
        shape = (num_outputs, self.num_groups(num_inputs))
        return (shape, shape[:1]) if self.scales == "channel" else (shape,)


def are_alike(formats: Sequence[LayerFormat | None]) -> bool:
    """Whether projections of these formats may lie in one weight; None: plain.

    They have the same numbers, groups, order and rounding of inputs. Where they come from in the
    folder may differ.
    """
    return len({None if form is None else _essence(form) for form in formats}) == 1


def _essence(form: LayerFormat) -> tuple[object, ...]:
    # A scale of a whole tensor becomes one of each output.
    scales = "channel" if form.scales == "tensor" else form.scales
    has_zeros = form.number == "int8" and not form.is_symmetric
    return (form.number, scales, form.group_size, has_zeros, form.order_digest, form.inputs)
