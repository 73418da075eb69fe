"""One linear layer of a folder that another tool quantized, on its way into our layout.

    pieces of its tensors -> staged on the device -> all there -> rows_of -> checks -> store_rows
    -> given up

Owns the staging and the questions that only values answer: whether scales are possible, zero points
what the configuration says, the stated shape the right one. Tensors of a layer are read together,
so that few layers are staged at a time, each no larger than in the file; of several ranks each
stages and decodes its part (`layer_part`). What is found is noted on the device and read once, at
the end.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from headrace_backend.quantization.source_numbers import rows_of
from headrace_backend.quantization.stored_weight import StoredRows
from headrace_backend.weights.checkpoint_files import DTYPES
from headrace_backend.weights.destination import Destination
from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.weight_formats.quantized_weight import BLOCK_SIZE, QuantKind
from headrace_kernels.weight_formats.stored_rows import Rows, store_blocks, store_order, store_rows
from headrace_model_folder import InvalidModelFolder, LayerFormat, Role, SourceTensor, TensorRecord
from headrace_model_folder.formats.layer_part import LayerPart

# Numbers that are unpacked and looked at a time. On a CPU they stay in its caches.
_CPU_NUMBERS = 1 << 22
# On a card each block is some twenty launches, that all readers wait for. In blocks of 4 Mi numbers
# a layer of a 70B model in e4m3 was 3,700 operations on each of two ranks, now 540; 128 MB of e4m3
# are about as much as is staged at a time.
_CARD_NUMBERS = 1 << 24
_CARD_E4M3_NUMBERS = 1 << 26

# What may be wrong with values: the tensor at fault, and the rule.
_FAULTS = (
    (Role.SCALES, "has a scale that is negative, or 0 where numbers are not"),
    (Role.SCALES, "has a scale that is too large or too small for the model's type"),
    (
        Role.ZEROS,
        "has zero points one above the middle of their range (they would be it with checkpoint_format gptq_v2)",
    ),
    (Role.ZEROS, "has a zero point that is not the middle of its range, and config.json says that all are"),
    (Role.SHAPE, "is not the shape that config.json says"),
    (Role.NUMBERS, "has a number that is not from -8 to 7"),
)
_BAD_SCALE, _UNFIT_SCALE, _OTHER_VERSION, _ODD_ZERO, _OTHER_SHAPE, _WIDE_NUMBER = range(len(_FAULTS))


class StagedLayer:
    """The tensors of one layer, and where they go."""

    def __init__(
        self,
        layer: str,
        form: LayerFormat,
        shape: tuple[int, int],
        target: WeightTarget,
        records: Mapping[str, TensorRecord],
    ) -> None:
        """Nothing is allocated.

        Args:
            layer: Its name in the folder.
            form: Its format.
            shape: Outputs and inputs of the whole layer.
            target: What a plain weight of it would go to; its destination is a `StoredRows`.
            records: The folder's.

        Raises:
            QuantizationRefused: A rank's part of it would cut words, groups or blocks; or its
                inputs are in an order and shared out.
        """
        assert isinstance(target.destination, StoredRows)
        self.layer = layer
        self._form, self._shape, self._into = form, shape, target.destination
        self._part = LayerPart(target.rows, target.columns or range(shape[1]))
        self._tensors = {
            f"{layer}.{tensor.suffix}": tensor
            for tensor in form.tensors(*shape)
            if f"{layer}.{tensor.suffix}" in records
        }
        self._records = records
        self._num_groups = len(self._part.groups(form))
        self._lock = threading.Lock()
        self._missing = len(self._tensors)
        self._staged: dict[Role, Tensor] = {}
        self._faults: Tensor | None = None
        if (reason := form.cuts(len(target.rows), len(self._part.inputs), shape)) is not None:
            raise QuantizationRefused(f"layer {layer!r}: {reason}")

    def targets(self) -> dict[str, WeightTarget]:
        """Name of each tensor -> where its rows go."""
        return {name: self._target(name, tensor) for name, tensor in self._tensors.items()}

    def check(self) -> None:
        """Refuses values that can't be. Waits for the device.

        Raises:
            InvalidModelFolder: File, tensor and rule are named.
        """
        assert self._faults is not None and not self._staged
        for (role, rule), is_there in zip(_FAULTS, self._faults.tolist(), strict=True):
            if is_there:
                name = self._name(role)
                raise InvalidModelFolder(f"{self._records[name].file}: tensor {name!r} {rule}")

    def _name(self, role: Role) -> str:
        return next(name for name, tensor in self._tensors.items() if tensor.role is role)

    def _target(self, name: str, tensor: SourceTensor) -> WeightTarget:
        # A single number is a row.
        rows, columns = self._part.places(self._form, tensor.role, self._records[name].shape or (1,))
        shape = (len(rows),) if columns is None else (len(rows), len(columns))
        stage = _Stage(self, tensor.role, shape, DTYPES[self._records[name].dtype])
        return WeightTarget(stage, rows, columns, batch=self.layer)

    def take(self, role: Role, tensor: Tensor) -> None:
        """Called by each tensor's stage once it is whole; the last one's call decodes."""
        with self._lock:
            self._staged[role] = tensor
            self._missing -= 1
            is_whole = self._missing == 0
        if is_whole:
            self._decode()
            self._staged.clear()

    @property
    def form(self) -> LayerFormat:
        """How it is stored."""
        return self._form

    @property
    def device(self) -> torch.device:
        """Device that the layer goes to."""
        return self._into.device

    def _decode(self) -> None:
        """Decodes staged tensors, whose outputs and inputs are counted from the part's first."""
        weight, first, num_outputs = self._into.weight, self._into.outputs.start, len(self._part.outputs)
        self._faults = torch.zeros(len(_FAULTS), dtype=torch.bool, device=self.device)
        self._look_at_whole_tensors()
        order, groups = self._stored_order(), self._stored_groups()
        step = max(_numbers_at_once(self._form, self.device) // len(self._part.inputs) // BLOCK_SIZE, 1) * BLOCK_SIZE
        for begin in range(0, num_outputs, step):
            outputs = slice(begin, min(begin + step, num_outputs))
            rows = rows_of(self._form, self._staged, outputs, self._num_groups)
            if order is not None:
                rows = rows._replace(numbers=rows.numbers.index_select(1, order))
            if groups is not None:
                rows = Rows(rows.numbers, _taken(rows.scales, groups), _taken(rows.zeros, groups))
            self._look_at(rows)
            if self._form.scales == "block":
                self._look_at_blocks(rows.numbers, begin)
            # Symmetric INT8 needs no zero points.
            kept = rows if weight.zeros is not None else rows._replace(zeros=None)
            store_rows(kept, weight, first + begin)
        if self._form.scales == "block":
            skipped = self._part.outputs.start % BLOCK_SIZE
            store_blocks(self._staged[Role.SCALES].float(), BLOCK_SIZE, weight, self._into.outputs, skipped)

    def _stored_groups(self) -> Tensor | None:
        """For each of the weight's groups, the folder's group that it is a piece of.

        None where both have the same groups.
        """
        size, piece, inputs = self._form.group_size, self._into.weight.group_size, self._part.inputs
        if not size or (piece == size and inputs.start % size == 0):
            return None
        firsts = torch.arange(inputs.start, inputs.stop, piece, device=self.device)
        return firsts.div(size, rounding_mode="floor") - inputs.start // size

    def _stored_order(self) -> Tensor | None:
        """Inputs in the order of their groups, noted in the weight; None: they are in order."""
        if not self._form.order_digest:
            return None
        order = torch.argsort(self._staged[Role.ORDER], stable=True)
        store_order(order, self._into.weight)
        return order

    def _note(self, fault: int, is_there: Tensor) -> None:
        assert self._faults is not None
        self._faults[fault].logical_or_(is_there)

    def _look_at_whole_tensors(self) -> None:
        form, staged = self._form, self._staged
        if Role.SHAPE in staged:
            stated = staged[Role.SHAPE]
            self._note(_OTHER_SHAPE, (stated[0] != self._shape[0]) | (stated[1] != self._shape[1]))
        if form.number == "int4" and Role.NUMBERS in staged and staged[Role.NUMBERS].dtype == torch.int8:
            numbers = staged[Role.NUMBERS]
            self._note(_WIDE_NUMBER, (numbers < -8).any() | (numbers > 7).any())
        if form.scales == "block":
            self._note(_BAD_SCALE, (staged[Role.SCALES] < 0).any())

    def _look_at_blocks(self, numbers: Tensor, begin: int) -> None:
        """A block of zeros may have any scale that is not negative, others none that is 0."""
        first = self._part.outputs.start % BLOCK_SIZE + begin
        above = first % BLOCK_SIZE
        scales = self._staged[Role.SCALES].float()[first // BLOCK_SIZE : -(-(first + len(numbers)) // BLOCK_SIZE)]
        height, width = len(scales) * BLOCK_SIZE, scales.shape[1] * BLOCK_SIZE
        sizes = numbers.view(torch.uint8) & 0x7F
        whole = functional.pad(sizes, (0, width - sizes.shape[1], above, height - above - len(sizes)))
        used = whole.view(len(scales), BLOCK_SIZE, scales.shape[1], BLOCK_SIZE).amax((1, 3)) > 0
        self._note(_BAD_SCALE, ((scales == 0) & used).any())

    def _look_at(self, rows: Rows) -> None:
        """Looks at rows as they are stored."""
        weight = self._into.weight
        if rows.scales is None:
            return
        groups = rows.numbers.reshape(len(rows.numbers), rows.scales.shape[1], -1)
        if rows.zeros is None:
            used = (groups.view(torch.uint8) & 0x7F).any(-1)
        else:
            used = (groups != rows.zeros[:, :, None]).any(-1)
            middle = 8 if weight.kind is QuantKind.INT4 else 0
            if self._form.is_symmetric:
                self._note(_ODD_ZERO, (rows.zeros != middle).any())
                if self._form.is_less_one:
                    self._note(_OTHER_VERSION, (rows.zeros == middle + 1).all())
        self._note(_BAD_SCALE, ((rows.scales == 0) & used).any())
        # Some tools choose the sign of a scale by which end of the range the largest weight is at.
        if not self._form.is_symmetric or self._form.number == "fp8":
            self._note(_BAD_SCALE, (rows.scales < 0).any())
        stored = rows.scales.to(weight.scales.dtype)
        self._note(_UNFIT_SCALE, (~stored.isfinite()).any() | ((stored == 0) & (rows.scales != 0) & used).any())


class _Stage(Destination):
    """One tensor of a layer, until all are there."""

    def __init__(self, layer: StagedLayer, role: Role, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.device = shape, dtype, layer.device
        self._layer, self._role = layer, role
        self._lock = threading.Lock()
        self._tensor: Tensor | None = None
        self._missing = shape[0]

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        with self._lock:
            if self._tensor is None:
                self._tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            tensor = self._tensor
        tensor[first : first + len(rows)] = rows
        with self._lock:
            self._missing -= len(rows)
            is_whole = self._missing == 0
        if is_whole:
            self._tensor = None
            self._layer.take(self._role, tensor)


def _numbers_at_once(form: LayerFormat, device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_NUMBERS
    return _CARD_E4M3_NUMBERS if form.number == "fp8" else _CARD_NUMBERS


def _taken(by_group: Tensor | None, groups: Tensor) -> Tensor | None:
    return None if by_group is None else by_group.index_select(1, groups)
