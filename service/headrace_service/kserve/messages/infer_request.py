"""One inference request, checked: what models get to see of it.

Owns the way from the wire's message to names and values, and where a request's outputs go: into the
response, or into shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_service.kserve.messages import parameters
from headrace_service.kserve.messages.parameters import RequestParameters
from headrace_service.kserve.messages.shared_memory import CallerRegions, Placement
from headrace_service.kserve.messages.signature import Signature
from headrace_service.kserve.messages.tensors import RequestTensors, Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for one model.

    Attributes:
        model_name: as the caller named it; responses say the same.
        id: the caller's, for it to tell responses apart.
        parameters: of the request.
        inputs: by name.
        outputs: names of those that are wanted.
        named_outputs: whether the caller listed them.
        placements: outputs that go into shared memory, by name.
    """

    model_name: str
    id: str
    parameters: RequestParameters
    inputs: Mapping[str, Tensor]
    outputs: frozenset[str]
    named_outputs: bool
    placements: Mapping[str, Placement]

    @property
    def batch_size(self) -> int:
        """First dimension of its inputs."""
        first = next(iter(self.inputs.values()), None)
        return first.shape[0] if first is not None and first.shape else 1


def parse(message: pb.ModelInferRequest, signature: Signature, regions: CallerRegions) -> InferRequest:
    """Returns a request for a model of this signature.

    Raises:
        ServiceError: a rule about parameters, tensors or shared memory is broken.
    """
    tensors = RequestTensors(message, message.model_name, signature, regions.read)
    outputs = frozenset(tensors.requested_outputs())
    placements = {
        output.name: placement
        for output in message.outputs
        if output.parameters and (placement := regions.placement(output.name, output.parameters)) is not None
    }
    return InferRequest(
        model_name=message.model_name,
        id=message.id,
        parameters=parameters.parse(message.parameters),
        inputs=tensors.decode(),
        outputs=outputs,
        named_outputs=len(message.outputs) > 0,
        placements=placements,
    )
