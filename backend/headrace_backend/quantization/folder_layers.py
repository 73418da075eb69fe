"""The layers of a folder that another tool quantized, between its tensors and the model's weights.

Owns the staging of all layers while they are read. What one layer's way is, `staged_layer` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_backend.quantization.staged_layer import StagedLayer
from headrace_backend.weights.destination import Destination
from headrace_backend.weights.placement import WeightTarget
from headrace_model_folder import InvalidModelFolder, ModelConfig, TensorRecord, needless_biases


class FolderLayers(NamedTuple):
    """What a folder's tensors go to, and what is to be asked once they are there."""

    targets: dict[str, WeightTarget]
    layers: list[StagedLayer]
    biases: dict[str, ZeroRows]

    def check(self, records: Mapping[str, TensorRecord]) -> None:
        """Refuses values that can't be. Waits for the device.

        Raises:
            InvalidModelFolder: File, tensor and rule are named.
        """
        for layer in self.layers:
            layer.check()
        for name, rows in self.biases.items():
            if not rows.are_zero():
                raise InvalidModelFolder(
                    f"{records[name].file}: tensor {name!r} is a bias that the architecture has no place for, and is "
                    "not 0"
                )


def stage_layers(
    config: ModelConfig,
    targets: Mapping[str, WeightTarget],
    shapes: Mapping[str, tuple[int, ...]],
    records: Mapping[str, TensorRecord],
) -> FolderLayers:
    """Makes the targets that a quantized folder's tensors are read into.

    Args:
        config: The folder's configuration.
        targets: The model's targets, by the names that plain weights would have.
        shapes: Whole shapes of those weights.
        records: The folder's tensors.

    Raises:
        QuantizationRefused: A rank's part of a layer would cut its groups.
    """
    forms = config.quantization.layers if config.quantization else {}
    found: dict[str, WeightTarget] = {}
    layers: list[StagedLayer] = []
    for name, target in targets.items():
        layer = name.removesuffix(".weight")
        if layer == name or layer not in forms:
            found[name] = target
            continue
        num_outputs, num_inputs = shapes[name]
        staged = StagedLayer(layer, forms[layer], (num_outputs, num_inputs), target, records)
        layers.append(staged)
        found.update(staged.targets())
    device = next(iter(targets.values())).device
    biases = {name: ZeroRows(shape, device) for name, shape in needless_biases(config).items() if name in records}
    found.update((name, WeightTarget(rows, range(rows.shape[0]))) for name, rows in biases.items())
    return FolderLayers(found, layers, biases)


class ZeroRows(Destination):
    """Takes what should be zeros, and keeps only whether it was."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, torch.float32, device
        self._is_other = torch.zeros((), dtype=torch.bool, device=device)

    def put(self, first: int, rows: Tensor) -> None:
        """Implements `Destination.put`."""
        # Not in place: readers' threads may be in another mode than the one that made it.
        self._is_other = self._is_other | (rows != 0).any().to(self.device)

    def are_zero(self) -> bool:
        """Whether all were. Waits for the device."""
        return not bool(self._is_other)
