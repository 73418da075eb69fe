"""Projections that a family's checkpoints keep in one tensor, such as gate and up."""

from __future__ import annotations

import dataclasses

from headrace_model_folder.description import Fused, Linear


def fused(name: str, *parts: Linear) -> list[Linear]:
    """The projections, one after the other in the tensors of `name`."""
    outputs = [part.outputs for part in parts]
    return [
        dataclasses.replace(part, fused=Fused(name, sum(outputs), sum(outputs[:index])))
        for index, part in enumerate(parts)
    ]
