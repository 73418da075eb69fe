"""Decodes a folder's words to numbers, scales and zero points in the ranges of our layouts.

Owns the bits of each format (`headrace_model_folder.formats.layer_format` describes them): int4 as
0 to 15 with zero points likewise, int8 as -128 to 127, e4m3 as it is. All outputs have a row,
whatever way the format stores them. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace_kernels.weight_formats.stored_rows import Rows
from headrace_model_folder import LayerFormat, Layout, Role

_MIDDLE = {"int4": 8, "int8": 128}


def shifts(form: LayerFormat, device: torch.device) -> Tensor:
    """[numbers in a word] int32, how far each is from a word's lowest bit."""
    if form.layout is not Layout.AWQ:
        # Made on the device: a list would be copied there, which waits for the stream.
        return torch.arange(0, 32, form.bits, dtype=torch.int32, device=device)
    # Of outputs 0 to 7: 0, 16, 4, 20, 8, 24, 12, 28.
    first = torch.arange(0, 16, 4, dtype=torch.int32, device=device)
    return torch.stack([first, first + 16], dim=1).flatten()


def numbers_of(form: LayerFormat, numbers: Tensor, outputs: slice) -> Tensor:
    """Decodes the numbers of some outputs.

    Args:
        form: The layer's format.
        numbers: The layer's tensor of numbers, whole.
        outputs: Range of outputs; begins and ends at whole words where words hold outputs.

    Returns:
        [num_outputs, K] uint8 for int4, int8, or e4m3. int4 that is stored as bytes may be out of
        range.
    """
    if form.layout is Layout.WHOLE:
        rows = numbers[outputs]
        return (rows + _MIDDLE["int4"]).view(torch.uint8) if form.number == "int4" else rows
    if form.layout is Layout.GPTQ:
        # [K/P, R] words -> [K/P, P, R]: inputs follow each other.
        found = _unpacked(form, numbers[:, outputs], 1).flatten(0, 1).t()
    elif form.layout is Layout.AWQ:
        # [K, R/8] words -> [K, R]: outputs do.
        found = _unpacked(form, numbers[:, _words(form, outputs)], 2).flatten(1).t()
    else:
        found = _unpacked(form, numbers[outputs], 2).flatten(1)
    return _in_range(form, found)


def zeros_of(
    form: LayerFormat, zeros: Tensor | None, outputs: slice, num_groups: int, device: torch.device
) -> Tensor | None:
    """Decodes the zero points of some outputs, in the ranges of their numbers.

    Args:
        form: The layer's format.
        zeros: The layer's tensor of zero points, whole; None where the format stores none.
        outputs: Range of outputs, with the rule of `numbers_of`.
        num_groups: Number of scales of an output.
        device: Device of the result.

    Returns:
        [num_outputs, groups], or None for FP8.
    """
    if form.number == "fp8":
        return None
    num_outputs = outputs.stop - outputs.start
    if zeros is None:
        assert form.is_symmetric
        middle, dtype = (8, torch.uint8) if form.number == "int4" else (0, torch.int8)
        return torch.full((num_outputs, num_groups), middle, dtype=dtype, device=device)
    if form.layout is Layout.WHOLE:
        rows = zeros.view(-1, num_groups)[outputs]
        return (rows + _MIDDLE["int4"]).view(torch.uint8) if form.number == "int4" else rows
    if form.layout is Layout.PACKED:
        words = zeros[_words(form, outputs)]
        return _in_range(form, _unpacked(form, words, 1).flatten(0, 1)[:num_outputs])
    words = zeros[:, _words(form, outputs)]
    if form.has_borrows:
        # One in every place of a word; carries undo the borrows that a zero point of 0 made.
        words = words + (0x11111111 if form.bits == 4 else 0x01010101)
    found = _unpacked(form, words, 2).flatten(1).t()
    if form.is_less_one and not form.has_borrows:
        # The largest stands for 0.
        found = (found + 1) & ((1 << form.bits) - 1)
    return _in_range(form, found)


def scales_of(form: LayerFormat, scales: Tensor, outputs: slice, num_groups: int) -> Tensor:
    """Scales of some outputs, [num_outputs, groups] fp32. Not of blocks, which are no outputs'."""
    if form.scales == "tensor":
        return scales.float().view(1, 1).expand(outputs.stop - outputs.start, 1)
    if form.layout in (Layout.GPTQ, Layout.AWQ):
        return scales[:, outputs].t().float()
    return scales.view(-1, num_groups)[outputs].float()


def rows_of(form: LayerFormat, tensors: Mapping[Role, Tensor], outputs: slice, num_groups: int) -> Rows:
    """All of it."""
    scales = None
    if form.scales != "block":
        scales = scales_of(form, tensors[Role.SCALES], outputs, num_groups)
    numbers = numbers_of(form, tensors[Role.NUMBERS], outputs)
    return Rows(numbers, scales, zeros_of(form, tensors.get(Role.ZEROS), outputs, num_groups, numbers.device))


def _words(form: LayerFormat, outputs: slice) -> slice:
    per_word = 32 // form.bits
    assert outputs.start % per_word == 0
    return slice(outputs.start // per_word, -(-outputs.stop // per_word))


def _unpacked(form: LayerFormat, words: Tensor, dim: int) -> Tensor:
    """Words with one dimension more, at `dim`, for the numbers in each: int32 from 0 on."""
    places = shifts(form, words.device).view([-1 if axis == dim else 1 for axis in range(words.dim() + 1)])
    return (words.unsqueeze(dim) >> places) & ((1 << form.bits) - 1)


def _in_range(form: LayerFormat, found: Tensor) -> Tensor:
    # In order in memory, where outputs may have been last.
    found = found.to(torch.uint8) if form.number == "int4" else (found - _MIDDLE["int8"]).to(torch.int8)
    return found.contiguous()
