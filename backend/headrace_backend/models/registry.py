"""Hugging Face architecture name -> model class, and loading a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.llama import LlamaForCausalLM, MistralForCausalLM
from headrace_backend.models.qwen2 import Qwen2ForCausalLM
from headrace_backend.models.qwen3 import Qwen3ForCausalLM
from headrace_backend.quantization.block_check import block_targets, summarize_blocks
from headrace_backend.quantization.folder_check import summarize_folder
from headrace_backend.quantization.folder_layers import formats_by_path, stage_layers
from headrace_backend.quantization.head_weight import summarize_head
from headrace_backend.quantization.nf4_weight import summarize_nf4
from headrace_backend.quantization.self_check import summarize
from headrace_backend.quantization.shared_scales import share_scales
from headrace_backend.weights.block_records import block_kinds, with_rotated_rows
from headrace_backend.weights.dummy import fill_with_noise
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.nf4_states import load_nf4_states
from headrace_backend.weights.placement import ALONE, Placement, Shard, WeightTarget
from headrace_backend.weights.progress import Progress
from headrace_backend.weights.scheme import Scheme, Schemes
from headrace_kernels.weight_formats.dequantized_buffer import scratch_bytes
from headrace_model_folder import InvalidModelFolder, ModelConfig, ModelFolder, TensorRecord, expected_tensors

MODEL_CLASSES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}

# What ranks do before they load where scales hold for more than a rank's part.
_FIRST_PHASE = "scales"


class WeightMemory(NamedTuple):
    """Bytes of a model's weights."""

    weights: int
    # The buffer that products with quantized weights share, taken with the weights.
    scratch: int = 0


def load_model(
    folder: ModelFolder | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load: Literal["folder", "dummy"],
    seed: int,
    progress: Progress,
    max_position: int | None = None,
    scheme: Scheme | None = None,
    shard: Shard = ALONE,
    head: Scheme | None = None,
) -> CausalLM:
    """Builds a model and fills its weights.

    Args:
        folder: Where the weights are; may be None for dummy weights.
        config: The model's configuration (`folder.config`).
        dtype: Type of weights and activations.
        device: Where they live.
        load: `folder`, or `dummy` for seeded Gaussian weights.
        seed: Of the dummy weights.
        progress: Called with (phase, done, total, unit); also a sign of life.
        max_position: Tokens of context to prepare for; the model's own limit by default.
        scheme: How the layers' weights are quantized while they are read; None: not at all.
        shard: Which of several ranks has which part.
        head: How the output layer's weight is; None: not at all.

    Returns:
        The model in evaluation form: no parameter requires a gradient.

    Raises:
        InvalidModelFolder: the architecture is unknown, or a weight can't be read or is not finite.
        QuantizationRefused: the scheme does not suit the model, or a quantized weight is not what
            it should be.
        ValueError: max_position is above the model's limit, or no folder to load from.
    """
    limit = config.max_position_embeddings
    if max_position is not None and not 1 <= max_position <= limit:
        raise ValueError(f"max_position must be from 1 to {limit} (the model's context), is {max_position}")
    if load == "folder" and folder is None:
        raise ValueError("load='folder' needs a folder")
    source = folder if load == "folder" else None
    records = source.tensors if source is not None else {}
    placement = _placement(config, dtype, device, Schemes(scheme, head), shard, records)
    model = _model_class(config)(config, placement, max_position or limit)
    targets, shapes = model.weight_targets(), expected_tensors(config)
    # Biases that are added once are rank 0's.
    assert targets.keys() == shapes.keys() if shard.rank == 0 else targets.keys() <= shapes.keys()
    share_scales(targets, shapes, shard, functools.partial(_fill_first, source, shapes, seed, progress))
    with torch.inference_mode():
        if source is None:
            fill_with_noise(targets, shapes, seed, progress)
        elif config.quantization is not None:
            _load_quantized(model, source, targets, progress)
        else:
            _load_rows(model, source, targets, progress)
        _check_schemes(model, targets, scheme, head)
    return model.eval()


def _check_schemes(
    model: CausalLM, targets: Mapping[str, WeightTarget], scheme: Scheme | None, head: Scheme | None
) -> None:
    """Checks what was quantized while it was read, and keeps what there is to say of it.

    Raises QuantizationRefused.
    """
    layers = {name: target for name, target in targets.items() if ".layers." in name}
    if scheme is not None and model.low_bit_weights:
        model.quantization = summarize(scheme, layers, model.low_bit_weights)
    elif scheme is not None:
        model.quantization = summarize_nf4(scheme, layers, model.block_weights)
    if head is not None and model.head_weight is not None:
        model.head_quantization = summarize_head(head, targets, model.head_weight)


def _fill_first(
    folder: ModelFolder | None,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    progress: Progress,
    targets: Mapping[str, WeightTarget],
) -> None:
    """Fills what looks at some tensors before all are loaded: a phase of its own, as they come a
    second time.

    Without a folder the weights are made up.
    """
    if folder is None:
        fill_with_noise(targets, shapes, seed, progress, _FIRST_PHASE)
    else:
        load_weights(folder, targets, progress, _FIRST_PHASE)


def _load_quantized(
    model: CausalLM, folder: ModelFolder, targets: Mapping[str, WeightTarget], progress: Progress
) -> None:
    """Fills a model from a folder whose layers another tool quantized."""
    quantization = folder.config.quantization
    assert quantization is not None
    staged = stage_layers(folder.config, targets, expected_tensors(folder.config), folder.tensors)
    load_weights(folder, staged.targets, progress)
    staged.check(folder.tensors)
    model.quantization = summarize_folder(quantization, model.low_bit_weights)


def _load_rows(model: CausalLM, folder: ModelFolder, targets: Mapping[str, WeightTarget], progress: Progress) -> None:
    """Fills a model by rows, whether numbers, which may be quantized as they come, or bytes that a
    file has in blocks.
    """
    records = folder.tensors
    targets = with_rotated_rows(targets, records)
    states = {
        name: (into.weight, targets[name]) for name, into in block_targets(targets) if records[name].nf4 is not None
    }
    load_nf4_states(folder, states)
    load_weights(folder, targets, progress)
    if any(block_targets(targets)):
        model.quantization = summarize_blocks(targets, model.block_weights, records)


def weight_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    scheme: Scheme | None,
    device: torch.device,
    shard: Shard = ALONE,
    records: Mapping[str, TensorRecord] | None = None,
    head: Scheme | None = None,
) -> WeightMemory:
    """What the weights of a rank will take on a device, exactly: a model is made as it would be,
    without memory.

    Args:
        config: The model's configuration.
        dtype: Type of weights and activations.
        scheme: How the layers' weights are quantized while they are read; None: not at all.
        device: Where they will live.
        shard: Which of several ranks.
        records: The checkpoint's tensors, of which some may be in blocks; None: none is.
        head: How the output layer's weight is quantized; None: not at all.

    Raises:
        InvalidModelFolder: the architecture is unknown.
        QuantizationRefused: the scheme does not suit the model.
    """
    placement = _placement(config, dtype, torch.device("meta"), Schemes(scheme, head), shard, records or {})
    model = _model_class(config)(config, placement, 1)
    low_bits = [*model.low_bit_weights.values(), *filter(None, [model.head_weight])]
    sizes = {(weight.num_outputs, weight.num_inputs) for weight in low_bits}
    blocks = [part for weight in model.block_weights.values() for part in weight.blocks]
    sizes |= {(part.num_outputs, part.num_inputs) for part in blocks}
    # Elsewhere products restore weights in small blocks, which they give up again.
    scratch = [scratch_bytes(*size, dtype) for size in sizes] if device.type == "cuda" else []
    return WeightMemory(model.weight_bytes, max(scratch, default=0))


def _placement(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Schemes,
    shard: Shard,
    records: Mapping[str, TensorRecord],
) -> Placement:
    """With what folder or file say of the bits of their weights."""
    stacked = CausalLM.stacked_params
    formats, kinds = formats_by_path(config, stacked), block_kinds(records, stacked)
    return Placement(dtype, device, shard, *schemes, formats=formats, blocks=kinds)


def _model_class(config: ModelConfig) -> type[CausalLM]:
    if config.architecture not in MODEL_CLASSES:
        raise InvalidModelFolder(
            f"config.json: architectures names {config.architecture!r}, known are {', '.join(MODEL_CLASSES)}"
        )
    return MODEL_CLASSES[config.architecture]
