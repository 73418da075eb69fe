"""A model's signature as ModelConfig and ModelMetadata.

Owns the two renderings. What cannot be said truthfully of this server (instance groups, batching
policies of its own) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_protos.inference import grpc_service_pb2 as pb
from headrace_protos.inference import model_config_pb2 as config_pb
from headrace_service.kserve.messages.refusals import VERSION
from headrace_service.kserve.messages.signature import Signature

_LATEST = config_pb.ModelVersionPolicy(latest=config_pb.ModelVersionPolicy.Latest(num_versions=1))


def config_of(name: str, signature: Signature, parameters: Mapping[str, str]) -> config_pb.ModelConfig:
    """Returns a model's configuration.

    Args:
        name: as the caller named it.
        signature: of the model.
        parameters: what else there is to say of it.
    """
    config = config_pb.ModelConfig(
        name=name,
        platform=signature.platform,
        backend=signature.backend,
        version_policy=_LATEST,
        max_batch_size=signature.max_batch_size,
        model_transaction_policy=config_pb.ModelTransactionPolicy(decoupled=signature.decoupled),
        parameters={key: config_pb.ModelParameter(string_value=value) for key, value in parameters.items()},
    )
    for spec in signature.inputs:
        config.input.add(name=spec.name, data_type=spec.datatype.number, dims=spec.dims, optional=spec.optional)
    for spec in signature.outputs:
        config.output.add(name=spec.name, data_type=spec.datatype.number, dims=spec.dims)
    if signature.keeps_sequences:
        config.sequence_batching.SetInParent()
    return config


def metadata_of(name: str, signature: Signature, properties: Mapping[str, str]) -> pb.ModelMetadataResponse:
    """Returns a model's tensors; `properties` are what else there is to say of it."""
    metadata = pb.ModelMetadataResponse(
        name=name, versions=[VERSION], platform=signature.platform or signature.backend, properties=properties
    )
    for spec in signature.inputs:
        metadata.inputs.add(name=spec.name, datatype=spec.datatype.name, shape=signature.shape_of(spec))
    for spec in signature.outputs:
        metadata.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=signature.shape_of(spec))
    return metadata
