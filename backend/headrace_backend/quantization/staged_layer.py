"""One linear layer of a folder that another tool quantized, on its way into our layout.

    pieces of its tensors -> staged whole on the device -> all there -> rows_of -> soundness -> store_rows -> given up

Owns the staging and the questions that only values answer: whether scales are possible, zero points what the configuration says, the stated shape the right one. Tensors of a layer are read together, so that
few layers are staged at a time, each no larger than in the file. What is found is noted on the device and read once, at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from headrace_backend.quantization.layer_statistics import LayerStatistics
from headrace_backend.quantization.source_numbers import rows_of
from headrace_backend.quantization.stored_weight import StoredRows
from headrace_backend.weights.checkpoint_files import DTYPES
from headrace_backend.weights.destination import Destination
from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_kernels.quantized_weight import BLOCK_SIZE, QuantKind
from headrace_kernels.stored_rows import Rows, store_blocks, store_order, store_rows
from headrace_model_folder import InvalidModelFolder, LayerFormat, Role, SourceTensor, TensorRecord

# Numbers that are unpacked at a time, in four bytes each: 16 MB.
_BLOCK_NUMBERS = 1 << 22
# Outputs that a word of any format may hold.
_WORD_OUTPUTS = 8

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
    (Role.INPUT_SCALE, "is not above 0"),
)
_BAD_SCALE, _UNFIT_SCALE, _OTHER_VERSION, _ODD_ZERO, _OTHER_SHAPE, _WIDE_NUMBER, _BAD_INPUT_SCALE = range(len(_FAULTS))


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
            QuantizationRefused: A rank's part of it would cut words, groups or blocks.
        """
        assert isinstance(target.destination, StoredRows)
        self.layer = layer
        self._form, self._shape, self._into = form, shape, target.destination
        self._outputs, self._inputs = target.rows, target.columns or range(shape[1])
        self._tensors = {
            f"{layer}.{tensor.suffix}": tensor
            for tensor in form.tensors(*shape)
            if f"{layer}.{tensor.suffix}" in records
        }
        self._records = records
        self._num_groups = form.num_groups(shape[1])
        self._lock = threading.Lock()
        self._missing = len(self._tensors)
        self._staged: dict[Role, Tensor] = {}
        self._faults: Tensor | None = None
        self.statistics = LayerStatistics(form.bits, form.is_symmetric)
        self._check_cuts()

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

    def _check_cuts(self) -> None:
        """A rank's outputs and inputs must begin and end where words, groups and blocks do."""
        form, outputs, inputs = self._form, self._outputs, self._inputs
        unit_outputs = BLOCK_SIZE if form.scales == "block" else _WORD_OUTPUTS
        unit_inputs = form.group_size or (BLOCK_SIZE if form.scales == "block" else 1)
        for part, size, unit, what in (
            (outputs, self._shape[0], unit_outputs, "outputs"),
            (inputs, self._shape[1], unit_inputs, "inputs"),
        ):
            if any(end % unit for end in (part.start, part.stop) if end != size):
                raise QuantizationRefused(
                    f"layer {self.layer!r}: {what} {part.start} to {part.stop} of {size} are no whole groups of {unit}, which another number of ranks may give"
                )
        if form.order_digest and len(inputs) < self._shape[1]:
            raise QuantizationRefused(
                f"layer {self.layer!r}: its inputs are in an order, and can't be split over ranks"
            )

    def _target(self, name: str, tensor: SourceTensor) -> WeightTarget:
        # A single number is a row.
        shape = self._records[name].shape or (1,)
        stage = _Stage(self, tensor.role, shape, DTYPES[self._records[name].dtype])
        columns = range(shape[1]) if len(shape) == 2 else None
        return WeightTarget(stage, range(shape[0]), columns, batch=self.layer)

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
        """Where the layer goes."""
        return self._into.device

    def _decode(self) -> None:
        weight, first, inputs = self._into.weight, self._into.outputs.start, self._inputs
        self._faults = torch.zeros(len(_FAULTS), dtype=torch.bool, device=self.device)
        self._look_at_whole_tensors()
        order = self._stored_order()
        step = max(_BLOCK_NUMBERS // self._shape[1] // BLOCK_SIZE, 1) * BLOCK_SIZE
        for begin in range(self._outputs.start, self._outputs.stop, step):
            outputs = slice(begin, min(begin + step, self._outputs.stop))
            rows = rows_of(self._form, self._staged, outputs, self._num_groups)
            numbers = rows.numbers[:, inputs.start : inputs.stop]
            rows = Rows(numbers if order is None else _taken(numbers, order), *self._of_inputs(rows))
            self._look_at(rows)
            if self._form.scales == "block":
                self._look_at_blocks(rows.numbers, begin)
            # Symmetric INT8 needs no zero points.
            kept = rows if weight.zeros is not None else rows._replace(zeros=None)
            store_rows(kept, weight, first + begin - self._outputs.start)
        self.statistics.finish(order)
        if self._form.scales == "block":
            self._store_blocks()

    def _of_inputs(self, rows: Rows) -> tuple[Tensor | None, Tensor | None]:
        """Scales and zero points of this rank's inputs."""
        size = self._form.group_size
        if not size:
            return rows.scales, rows.zeros
        groups = slice(self._inputs.start // size, self._inputs.stop // size)
        assert rows.scales is not None
        return rows.scales[:, groups], None if rows.zeros is None else rows.zeros[:, groups]

    def _stored_order(self) -> Tensor | None:
        """Inputs in the order of their groups, noted in the weight; None where they are as they come."""
        if not self._form.order_digest:
            return None
        order = torch.argsort(self._staged[Role.ORDER], stable=True)
        store_order(order, self._into.weight)
        return order

    def _store_blocks(self) -> None:
        store_blocks(self._blocks_of(self._outputs), BLOCK_SIZE, self._into.weight, self._into.outputs)

    def _blocks_of(self, outputs: range) -> Tensor:
        """Scales of the blocks of some outputs and this rank's inputs, fp32."""
        return self._staged[Role.SCALES].float()[
            outputs.start // BLOCK_SIZE : -(-outputs.stop // BLOCK_SIZE),
            self._inputs.start // BLOCK_SIZE : -(-self._inputs.stop // BLOCK_SIZE),
        ]

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
        if Role.INPUT_SCALE in staged:
            self._note(_BAD_INPUT_SCALE, (staged[Role.INPUT_SCALE] <= 0).any())
        if form.scales == "block":
            self._note(_BAD_SCALE, (staged[Role.SCALES] < 0).any())

    def _look_at_blocks(self, numbers: Tensor, begin: int) -> None:
        """A block of zeros may have any scale that is not negative, others none that is 0."""
        scales = self._blocks_of(range(begin, begin + len(numbers)))
        height, width = len(scales) * BLOCK_SIZE, scales.shape[1] * BLOCK_SIZE
        sizes = numbers.view(torch.uint8) & 0x7F
        whole = functional.pad(sizes, (0, width - sizes.shape[1], 0, height - len(sizes)))
        used = whole.view(len(scales), BLOCK_SIZE, scales.shape[1], BLOCK_SIZE).amax((1, 3)) > 0
        self._note(_BAD_SCALE, ((scales == 0) & used).any())

    def _look_at(self, rows: Rows) -> None:
        """Of rows as they are stored."""
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
            self.statistics.add(groups, rows.zeros, rows.scales)
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
        """See Destination."""
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


def _taken(numbers: Tensor, order: Tensor) -> Tensor:
    return numbers.index_select(1, order)
