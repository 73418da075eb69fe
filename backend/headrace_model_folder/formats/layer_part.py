"""Finds the rows and columns of a quantized layer's tensors that hold some outputs and inputs.

Each rank reads its own bytes of a folder that another tool quantized, and a projection its own of a
tensor that holds several.

Owns where each layout (`layer_format`) has outputs and inputs, one by one, in words, in groups or
in blocks. Whether a part may be cut there is `LayerFormat.cuts`'.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace_model_folder.formats.layer_format import BLOCK_SIZE, LayerFormat, Layout, Role


class LayerPart(NamedTuple):
    """Some outputs and inputs of a layer, in the order of its plain weight."""

    outputs: range
    inputs: range

    def places(self, form: LayerFormat, role: Role, shape: tuple[int, ...]) -> tuple[range, range | None]:
        """Rows and columns of one of its tensors that are read.

        Args:
            form: The layer's format.
            role: What the tensor holds.
            shape: The whole tensor's shape; at least one dimension.

        Returns:
            Both; no columns where it has one dimension.
        """
        if role is Role.ORDER:
            return self.inputs, None
        if role not in (Role.NUMBERS, Role.SCALES, Role.ZEROS) or (
            form.scales == "tensor" and role is not Role.NUMBERS
        ):
            return range(shape[0]), range(shape[1]) if len(shape) == 2 else None
        if form.layout in (Layout.GPTQ, Layout.AWQ):
            return self._by_inputs(form, role)
        rows, columns = self._by_outputs(form, role)
        return rows, columns if len(shape) == 2 else None

    def _by_inputs(self, form: LayerFormat, role: Role) -> tuple[range, range]:
        """GPTQ and AWQ have inputs, or groups of them, in the first dimension."""
        words = 32 // form.bits
        if role is Role.SCALES:
            return self.groups(form), self.outputs
        if role is Role.ZEROS:
            return self.groups(form), _covering(self.outputs, words)
        if form.layout is Layout.AWQ:
            return self.inputs, _covering(self.outputs, words)
        return _covering(self.inputs, words), self.outputs

    def _by_outputs(self, form: LayerFormat, role: Role) -> tuple[range, range]:
        is_packed, words = form.layout is Layout.PACKED, 32 // form.bits
        if role is Role.NUMBERS:
            return self.outputs, _covering(self.inputs, words) if is_packed else self.inputs
        unit = BLOCK_SIZE if form.scales == "block" else words if is_packed and role is Role.ZEROS else 1
        return _covering(self.outputs, unit), self.groups(form)

    def groups(self, form: LayerFormat) -> range:
        """Groups that its inputs are in; the only one where a scale holds for all."""
        size = BLOCK_SIZE if form.scales == "block" else form.group_size
        return _covering(self.inputs, size) if size else range(1)

    def cut_unit(self, form: LayerFormat) -> int | None:
        """Outputs that share a word or a block that the part cuts; None: it cuts none."""
        packs_outputs = form.layout in (Layout.GPTQ, Layout.AWQ)
        packs_zeros = form.layout is Layout.PACKED and not form.is_symmetric
        unit = BLOCK_SIZE if form.scales == "block" else 32 // form.bits if packs_outputs or packs_zeros else 1
        is_cut = self.outputs.start % unit or (form.scales != "block" and self.outputs.stop % unit)
        return unit if is_cut else None


def _covering(part: range, unit: int) -> range:
    """Units that a part lies in."""
    return range(part.start // unit, -(-part.stop // unit))
