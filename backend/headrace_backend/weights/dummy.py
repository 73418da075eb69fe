"""Seeded Gaussian weights, for measurements without a checkpoint. A tensor's values depend on seed and name only, not on order or on how ranks share it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch

from headrace_backend.weights.placement import WeightTarget

STANDARD_DEVIATION = 0.02

Progress = Callable[[str, int, int, str], None]


def fill_with_noise(
    targets: Mapping[str, WeightTarget], shapes: Mapping[str, tuple[int, ...]], seed: int, progress: Progress
) -> None:
    """Fills every target from N(0, 0.02^2); norm weights (one dimension, not a bias) are 1, so that activations keep their size.

    Args:
        targets: Checkpoint tensor name -> where it goes.
        shapes: Checkpoint tensor name -> its whole shape.
        seed: 0 to 2^63 - 1.
        progress: Called with (phase, done, total, unit).
    """
    for done, (name, target) in enumerate(targets.items()):
        progress("dummy weights", done, len(targets), "tensors")
        if len(shapes[name]) == 1 and name.endswith("norm.weight"):
            target.tensor.fill_(1.0)
            continue
        whole = torch.empty(shapes[name]).normal_(0.0, STANDARD_DEVIATION, generator=_generator(seed, name))
        kept = whole[target.rows.start : target.rows.stop]
        if target.columns is not None:
            kept = kept[:, target.columns.start : target.columns.stop]
        target.tensor.copy_(kept)
    progress("dummy weights", len(targets), len(targets), "tensors")


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
