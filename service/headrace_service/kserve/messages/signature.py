"""What a model takes and gives: its tensors, and how requests and responses relate.

Owns the plain data that requests are checked against (`tensors`) and that ModelConfig and
ModelMetadata report (`model_config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace_service.kserve.messages.datatypes import BY_NAME, Datatype


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """The name, data type and shape of one tensor that a model takes or gives.

    Attributes:
        name: of the tensor.
        datatype: of its elements.
        dims: sizes without the batch dimension; -1: any.
        optional: whether a request may leave the input out.
    """

    name: str
    datatype: Datatype
    dims: tuple[int, ...]
    optional: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a shape without batch dimension is one of this tensor's."""
        return len(shape) == len(self.dims) and all(
            size >= 0 and want in (-1, size) for want, size in zip(self.dims, shape, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The tensors that a model takes and gives, and its batching.

    Attributes:
        inputs: in the order of its configuration.
        outputs: likewise.
        max_batch_size: largest first dimension of all tensors; 0: they have no batch dimension.
        decoupled: whether a request may have any number of responses.
        backend: what runs it, as the configuration names it.
        platform: likewise, for models that have a platform instead.
        keeps_sequences: whether it keeps state between the requests of a sequence.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    decoupled: bool = False
    backend: str = "headrace"
    platform: str = ""
    keeps_sequences: bool = False

    def input(self, name: str) -> TensorSpec | None:
        """Returns the input of this name."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        """Returns the output of this name."""
        return next((spec for spec in self.outputs if spec.name == name), None)

    def shape_of(self, spec: TensorSpec) -> list[int]:
        """A tensor's shape as requests have it."""
        return [*([-1] if self.max_batch_size else []), *spec.dims]


def tensor(name: str, datatype: str, *dims: int, optional: bool = False) -> TensorSpec:
    """Returns a tensor by the name of its type."""
    return TensorSpec(name, BY_NAME[datatype], dims, optional)
