"""The original folder's tensors, one at a time, in their own types.

Owns no tensor longer than its caller does: nothing is kept, nothing is mapped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace_backend.weights.checkpoint_files import DTYPES, CheckpointFiles, not_finite
from headrace_model_folder import ModelFolder
from headrace_quantize.stored_parts import stored_parts


class SourceTensors:
    """Reads from a validated folder. To be closed."""

    def __init__(self, model: ModelFolder) -> None:
        self._records, self._parts = model.tensors, stored_parts(model.config.description)
        self._files = CheckpointFiles(model.path)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return DTYPES[self._records[self._parts_of(name)[0]].dtype]

    def read(self, name: str) -> Tensor:
        """A tensor by the folder's name, in host memory.

        Raises:
            InvalidModelFolder: It can't be read, or is not finite.
        """
        parts = [self._read(part) for part in self._parts_of(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts_of(self, name: str) -> tuple[str, ...]:
        return self._parts.get(name, (name,))

    def _read(self, name: str) -> Tensor:
        record = self._records[name]
        tensor = torch.empty(math.prod(record.shape), dtype=DTYPES[record.dtype])
        self._files.read(tensor, record.offset, record.file, name)
        if tensor.numel() and not all(math.isfinite(bound) for bound in tensor.aminmax()):
            raise not_finite(record.file, name)
        return tensor.view(record.shape)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()
