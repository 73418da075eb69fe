"""NF4: rounding rows to it, and reading what bitsandbytes stores.

Owns how numbers are rounded. Groups of 64 inputs share a scale, their largest number; what is left
of a number is rounded to the nearest of 16. Scales are then rounded to 8 bits themselves: less
their row's mean, over the largest that is left, to the nearest of 256 ("double quantization").
Source: QLoRA, arXiv 2305.14314, section 3. bitsandbytes does the same to flattened tensors, with
nested scales of 256 groups, and one mean of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.weight_formats.block_weight import (
    BlockKind,
    BlockWeight,
    Pieces,
    nf4_numbers,
    scale_codes,
    store_rows,
)

GROUP = 64
# Groups that share a nested scale in bitsandbytes' layout, counted along a tensor.
BITSANDBYTES_NESTED = 256
# Numbers in fp32 at a time: 16 MB.
_BLOCK_NUMBERS = 1 << 22


def quantize_rows(weight_rows: Tensor, target: BlockWeight, first_row: int) -> None:
    """Rounds rows to the nearest numbers of NF4 and stores them.

    Args:
        weight_rows: [num_rows, K] bf16, fp16 or fp32, finite, on the target's device.
        target: Weight of kind NF4 with a nested scale for each row; changed in its rows `first_row`
            and on.
        first_row: Row of the target that the first one becomes.
    """
    assert target.kind is BlockKind.NF4 and target.nested == target.num_inputs // GROUP
    step = max(_BLOCK_NUMBERS // target.num_inputs, 1)
    for first in range(0, len(weight_rows), step):
        store_rows(_rounded(weight_rows[first : first + step].float()), target, first_row + first)


def _rounded(wide: Tensor) -> Pieces:
    groups = wide.reshape(len(wide), -1, GROUP)
    scales = groups.abs().amax(2)
    codes, nested, means = _rounded_scales(scales)
    # By the scale that is stored, not by the one before its own rounding.
    stored = scale_codes(wide.device)[codes.to(torch.int32)] * nested[:, None] + means[:, None]
    tiny = torch.finfo(torch.float32).tiny
    numbers = _nearest(groups / stored.clamp(min=tiny)[:, :, None], nf4_numbers(torch.float32, wide.device))
    return Pieces(numbers.flatten(1), nested, means, codes)


def _rounded_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[num_rows, groups] -> places in the table, nested scale and mean of each row."""
    means = scales.mean(1)
    rest = scales - means[:, None]
    nested = rest.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    return _nearest(rest / nested[:, None], scale_codes(scales.device)), nested, means


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """Places of the nearest numbers in an ascending table, uint8; of two as near, the smaller."""
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2).to(torch.uint8)


def pieces_of_bytes(packed: Tensor) -> Tensor:
    """Rows as bitsandbytes has them, uint8 [num_rows, K / 2], as `Pieces` of [num_rows, K].

    The upper half of a byte comes first.
    """
    return torch.stack((packed >> 4, packed & 15), 2).flatten(1)
