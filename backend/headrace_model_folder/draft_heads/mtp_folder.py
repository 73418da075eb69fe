"""The MTP layer of a model folder, as a folder of its own: what can be refused of it without torch.

Folders announce the layer in config.json, where it is the default even of those that leave it out;
so its tensors are asked for only by who drafts with it. Owns that question, and which of its
projections are plain: tools that quantize a model often leave this layer as it was, and not all of
them say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace_model_folder.config import CONFIG_FILE, ModelConfig
from headrace_model_folder.errors import InvalidModelFolder
from headrace_model_folder.expected_tensors import check_tensors, parameter_count
from headrace_model_folder.folder import ModelFolder, with_inputs
from headrace_model_folder.formats.expert_formats import refuse_mixed_experts, without_plain
from headrace_model_folder.safetensors_header import TensorRecord
from headrace_model_folder.stacked_experts import split_joined

# Copies of the model's embedding and output layer, which training shares.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def open_mtp(folder: ModelFolder) -> ModelFolder:
    """Opens the MTP layer of a folder whose config.json announces one.

    Args:
        folder: The model's folder; one that was opened without weights is not asked for tensors.

    Returns:
        The folder with the layer's configuration in place of the model's, and its tensors beside
        the model's embedding and output layer.

    Raises:
        InvalidModelFolder: The folder has no such layer, or one that is wrong; the tensor is named.
    """
    config = folder.config.mtp
    assert config is not None, "config.json announces an MTP layer"
    if folder.tensors and folder.gguf_file is not None:
        # Which are checked where the file is opened.
        folder = dataclasses.replace(folder, tensors=_own_tensors(folder, config))
    elif folder.tensors:
        tensors = split_joined(config, _own_tensors(folder, config))
        config = _with_plain(config, tensors)
        check_tensors(config, tensors)
        config = with_inputs(folder.path, config, tensors)
        folder = dataclasses.replace(folder, tensors=tensors)
    return dataclasses.replace(folder, config=config, parameter_count=parameter_count(config))


def _own_tensors(folder: ModelFolder, config: ModelConfig) -> dict[str, TensorRecord]:
    """The layer's tensors, with the model's that it shares."""
    [layer] = config.description.layers
    # They begin with the layer's name, or with what its name and those beside it begin with.
    [prefix] = [each for each in folder.config.description.unused if f"{layer.name}.".startswith(each)]
    own = {name: record for name, record in folder.tensors.items() if name.startswith(prefix)}
    for copy in _COPIES:
        own.pop(f"{prefix}{copy}", None)
    if not own:
        if folder.gguf_file is not None:
            raise InvalidModelFolder(
                f"{folder.gguf_file}: nextn_predict_layers is 1, and the file has no tensors of a layer "
                f"{len(folder.config.description.layers)}"
            )
        raise InvalidModelFolder(
            f"{CONFIG_FILE} announces an MTP layer (num_nextn_predict_layers or mtp_num_hidden_layers is 1), and the "
            f"folder has no tensors {prefix}*"
        )
    shared = (f"{config.description.embedding.name}.weight", config.description.head_tensor()[0])
    return own | {name: folder.tensors[name] for name in shared if name in folder.tensors}


def _with_plain(config: ModelConfig, tensors: Mapping[str, TensorRecord]) -> ModelConfig:
    """The configuration with projections plain that the folder has so, whatever config.json says.

    Raises:
        InvalidModelFolder: Experts are not all in one format.
    """
    if config.quantization is None:
        return config
    layers = without_plain([linear.name for linear in config.description.linears], config.quantization.layers, tensors)
    refuse_mixed_experts(config.description.expert_products, layers)
    # Of a layer without quantized projections there is nothing to stage.
    quantization = dataclasses.replace(config.quantization, layers=layers) if layers else None
    return dataclasses.replace(config, quantization=quantization)
