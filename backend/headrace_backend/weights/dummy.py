"""Seeded Gaussian weights, for measurements without a checkpoint.

A tensor's values depend on seed and name only, not on order or on how ranks share it. They are
drawn where the weights live, a card's by its own generator, so that 16 GB take about as long as
writing them; on another kind of device, or in another type on a card, they are others.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping

import torch

from headrace_backend.weights.checkpoint_files import row_pieces
from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.progress import Progress

STANDARD_DEVIATION = 0.02
# Handed over at once: quantizing needs several times a piece's memory.
_PIECE_ELEMENTS = 8 << 20
# Factors of norms, of the residual stream, of what a router reads, and of its experts.
_FACTORS = re.compile(r"norm(_\d)?\.weight$|\.layer_scalar$|\.router\.(per_expert_)?scale$")


def fill_with_noise(
    targets: Mapping[str, WeightTarget],
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    progress: Progress,
    phase: str = "dummy weights",
) -> None:
    """Fills every target from N(0, 0.02^2), and factors of norms and the like with 1.

    Activations then keep their size.

    Args:
        targets: Checkpoint tensor name -> where it goes.
        shapes: Checkpoint tensor name -> its whole shape.
        seed: 0 to 2^63 - 1.
        progress: Called with (phase, done, total, unit).
        phase: What to call it there.
    """
    for done, (name, target) in enumerate(targets.items()):
        progress(phase, done, len(targets), "tensors")
        if len(shapes[name]) == 1 and _FACTORS.search(name):
            target.tensor.fill_(1.0)
        elif _is_drawn_in_place(target, shapes[name]):
            _draw(target.tensor, seed, name)
        else:
            _fill_part(target, shapes[name], seed, name)
    _wait(targets)
    progress(phase, len(targets), len(targets), "tensors")


def _is_drawn_in_place(target: WeightTarget, shape: tuple[int, ...]) -> bool:
    tensor = target.destination.in_place
    return tensor is not None and tensor.is_cuda and tensor.shape == shape and tensor.is_contiguous()


def _fill_part(target: WeightTarget, shape: tuple[int, ...], seed: int, name: str) -> None:
    """Draws the whole tensor and hands the target's part over in pieces.

    On a CPU drawn in fp32; what is handed over has the type of plain weights in any case.
    """
    into = target.destination
    on_card = into.device.type == "cuda"
    whole = torch.empty(shape, dtype=into.dtype if on_card else torch.float32, device=into.device if on_card else None)
    _draw(whole, seed, name)
    for first, end in row_pieces(target.rows, max(_PIECE_ELEMENTS // math.prod(shape[1:]), 1)):
        target.put(whole[first:end].to(into.dtype).flatten(), first, end)


def _draw(tensor: torch.Tensor, seed: int, name: str) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _wait(targets: Mapping[str, WeightTarget]) -> None:
    """Until the weights are there, so that the phase's time is its own."""
    device = next(iter(targets.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
