"""From a `ModelBuild` to a model with its weights, or to the memory that they will take."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.weighted_module import WeightedModule
from headrace_backend.quantization.expert_weight import BlockExpertWeight, summarize_mxfp4
from headrace_backend.quantization.folder_layers import stage_layers
from headrace_backend.quantization.shared_scales import share_scales
from headrace_backend.quantization.summaries import (
    block_targets,
    summarize,
    summarize_blocks,
    summarize_folder,
    summarize_head,
)
from headrace_backend.weights.block_records import as_in_file
from headrace_backend.weights.dummy import fill_with_noise
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.nf4_states import load_nf4_states
from headrace_backend.weights.placement import WeightTarget
from headrace_backend.weights.progress import Progress
from headrace_backend.weights.scheme import Schemes
from headrace_backend.weights.stacked_rows import with_stacked_experts
from headrace_kernels.weight_formats.dequantized_buffer import scratch_bytes
from headrace_model_folder import ModelFolder, expected_tensors
from headrace_model_folder.formats.quantization_config import MXFP4

# What ranks do before they load where scales hold for more than a rank's part.
_FIRST_PHASE = "scales"


class WeightMemory(NamedTuple):
    """Bytes of a model's weights."""

    weights: int
    # The buffer that products with quantized weights share, taken with the weights.
    scratch: int = 0


def load_model(build: ModelBuild, folder: ModelFolder | None, progress: Progress, seed: int = 0) -> CausalLM:
    """Builds a model and fills its weights.

    Args:
        build: The model's parts, type, device, bits and rank.
        folder: The folder with the weights; None: seeded Gaussian weights.
        progress: Called with (phase, done, total, unit); also a sign of life.
        seed: Seed of Gaussian weights.

    Returns:
        The model in evaluation form: no parameter requires a gradient.

    Raises:
        InvalidModelFolder: a weight can't be read or is not finite.
        QuantizationRefused: the bits do not suit the model, or a quantized weight is not what it
            should be.
    """
    model = build.empty_model()
    targets, shapes = model.weight_targets(), expected_tensors(build.config)
    # Biases that are added once are rank 0's, other ranks' experts and stages' layers are not here.
    has_all = build.shard.rank == 0 and build.stage.count == 1 and not build.shard.whole_experts
    assert targets.keys() == shapes.keys() if has_all else targets.keys() <= shapes.keys()
    fill_weights(model, targets, build, folder, progress, seed)
    return model.eval()


def fill_weights(
    model: WeightedModule,
    targets: Mapping[str, WeightTarget],
    build: ModelBuild,
    folder: ModelFolder | None,
    progress: Progress,
    seed: int = 0,
) -> None:
    """Fills a module's weights, and checks those that are quantized.

    Args:
        model: The module; how its weights were quantized is noted in it.
        targets: Its weights, tensors of `build.config` or some of them.
        build: What the module was made of.
        folder: The folder with the weights; None: seeded Gaussian weights.
        progress: Called with (phase, done, total, unit).
        seed: Seed of Gaussian weights.

    Raises:
        InvalidModelFolder: As `load_model`.
        QuantizationRefused: As `load_model`.
    """
    shapes = expected_tensors(build.config)
    share_scales(targets, shapes, build.shard, functools.partial(_fill_first, folder, shapes, seed, progress))
    with torch.inference_mode():
        if folder is None:
            fill_with_noise(targets, shapes, seed, progress)
        elif build.config.quantization is not None and build.config.quantization.method != MXFP4:
            _load_quantized(model, folder, targets, progress)
        else:
            _load_rows(model, folder, targets, progress)
        _check_schemes(model, targets, build.bits)
        if model.mxfp4_weights and model.quantization is None:
            model.quantization = summarize_mxfp4(model.mxfp4_weights.items())


def _check_schemes(model: WeightedModule, targets: Mapping[str, WeightTarget], bits: Schemes) -> None:
    """Checks what was quantized while it was read, and keeps what there is to say of it.

    Raises QuantizationRefused.
    """
    layers, (scheme, head) = {name: target for name, target in targets.items() if ".layers." in name}, bits
    if scheme is not None:
        model.quantization = summarize(scheme, layers, model.low_bit_weights or model.block_weights)
    if head is not None and model.head_weight is not None:
        model.head_quantization = summarize_head(head, targets, model.head_weight)


def _fill_first(
    folder: ModelFolder | None,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    progress: Progress,
    targets: Mapping[str, WeightTarget],
) -> None:
    """Fills what needs some tensors before all are loaded, in a phase of its own.

    Those tensors are read a second time later.

    Without a folder the weights are noise.
    """
    if folder is None:
        fill_with_noise(targets, shapes, seed, progress, _FIRST_PHASE)
    else:
        load_weights(folder, with_stacked_experts(targets, folder.config.description), progress, _FIRST_PHASE)


def _load_quantized(
    model: WeightedModule, folder: ModelFolder, targets: Mapping[str, WeightTarget], progress: Progress
) -> None:
    """Fills a model from a folder whose layers another tool quantized."""
    quantization = folder.config.quantization
    assert quantization is not None
    staged = stage_layers(folder.config, targets, expected_tensors(folder.config), folder.tensors)
    load_weights(folder, staged.targets, progress)
    staged.check(folder.tensors)
    if model.low_bit_weights:
        # Not so where a stage has only layers that the tool left as they were.
        model.quantization = summarize_folder(quantization, model.low_bit_weights)


def _load_rows(
    model: WeightedModule, folder: ModelFolder, targets: Mapping[str, WeightTarget], progress: Progress
) -> None:
    """Fills a model by rows: numbers, which may be quantized as they come, or file blocks."""
    records = folder.tensors
    targets = as_in_file(targets, records)
    states = {
        name: (into.weight, targets[name]) for name, into in block_targets(targets) if records[name].nf4 is not None
    }
    load_nf4_states(folder, states)
    load_weights(folder, with_stacked_experts(targets, folder.config.description), progress)
    experts = {path: each for path, each in model.low_bit_weights.items() if isinstance(each, BlockExpertWeight)}
    in_file = {} if folder.gguf_file is None else model.mxfp4_weights
    if any(block_targets(targets)) or experts or in_file:
        model.quantization = summarize_blocks(targets, {**model.block_weights, **experts, **in_file}, records)


def weight_memory(build: ModelBuild) -> WeightMemory:
    """Bytes that the weights of a rank take on its device, exactly.

    A model is made as it would be, without memory.

    Raises QuantizationRefused where the bits do not suit the model.
    """
    return module_memory(build.weightless_model(), build)


def module_memory(model: WeightedModule, build: ModelBuild) -> WeightMemory:
    """Bytes of a module that was made without memory.

    Args:
        model: The module.
        build: Type and device that it would have.
    """
    low_bits = [*model.low_bit_weights.values(), *filter(None, [model.head_weight])]
    sizes = {(weight.num_outputs, weight.num_inputs) for weight in low_bits}
    blocks = [part for weight in model.block_weights.values() for part in weight.blocks]
    sizes |= {(part.num_outputs, part.num_inputs) for part in blocks}
    # Elsewhere products dequantize weights in small blocks, which they give up again.
    scratch = [scratch_bytes(*size, build.dtype) for size in sizes] if build.device.type == "cuda" else []
    return WeightMemory(model.weight_bytes, max(scratch, default=0))
