"""What a worker asks and reports of quantized weights: whether settings suit, and how it went.

Owns the notice where a device has no products of the chosen kind. How weights are quantized is
`quantization`'s and `weights`' business.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import torch

from headrace_backend.cards import Card, has_fp8_products
from headrace_backend.config import EngineConfig
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.rounded_inputs import describe_inputs
from headrace_backend.quantization.stored_weight import KINDS
from headrace_backend.quantization.summaries import QuantizationSummary, StoredSummary
from headrace_backend.quantize_rules import unsuitable_head, unsuitable_quantization
from headrace_backend.step.messages import Notice, QuantizationReport
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up.device import choose_dtype
from headrace_kernels import card
from headrace_kernels.weight_formats.block_weight import BlockKind
from headrace_kernels.weight_formats.quantized_weight import QuantKind
from headrace_model_folder import ModelFolder


def checked_schemes(config: EngineConfig, folder: ModelFolder, device: torch.device, channel: Channel) -> Schemes:
    """What weights are quantized by. Tells the operator what is not as it might be.

    Raises:
        StartRefused: The settings do not suit the model.
    """
    if (reason := unsuitable_quantization(config, folder.config, folder.gguf_file)) is not None:
        raise StartRefused(reason)
    if (reason := unsuitable_head(config, folder)) is not None:
        raise StartRefused(reason)
    schemes = Schemes.named(config.quantize, config.quantize_group, config.quantize_head, config.quantize_activations)
    if config.quantize_activations == "fp8" and (reason := _without_w4a8(config, folder, device)) is not None:
        raise StartRefused(reason)
    kinds = {scheme.kind for scheme in schemes if scheme is not None}
    if schemes.layers is None:
        kinds |= folder_kinds(folder)
    if kinds and device.type == "cuda":
        found = Card(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        notice = without_products(kinds, found)
        if notice is not None:
            channel.send_message(Notice(notice))
    return schemes


def _without_w4a8(config: EngineConfig, folder: ModelFolder, device: torch.device) -> str | None:
    """Why this card multiplies no INT4 by FP8; None if it does, or is none."""
    if device.type != "cuda":
        return None
    if not card.has_fp8_products(device):
        return f"quantize_activations is fp8, and {torch.cuda.get_device_name(device)} has no FP8 products; auto works"
    dtype = choose_dtype(config.dtype, folder.config, device)
    if dtype is not torch.bfloat16:
        return f"quantize_activations is fp8, and dtype is {dtype}: FP8 products give bf16; dtype bf16 or auto works"
    return None


def folder_kinds(folder: ModelFolder) -> set[QuantKind]:
    """Kinds of numbers that another tool gave the folder's layers."""
    quantization = folder.config.quantization
    numbers = {form.number for form in quantization.layers.values()} if quantization else set()
    return {KINDS[number] for number in numbers if number in KINDS}


def without_products(kinds: Collection[QuantKind | BlockKind], found: Card) -> str | None:
    """One line where a card can't multiply by numbers of these kinds themselves.

    None where it can, or no card does.
    """
    if QuantKind.FP8 not in kinds or has_fp8_products(found):
        return None
    return (
        f"{found.name}, {found.generation}, has no FP8 products: weights stay in FP8 and are turned into the "
        "model's type for each product"
    )


def quantization_report(model: CausalLM) -> QuantizationReport | None:
    """How the model was quantized, as it is reported; None if it was not."""
    layers, head = model.quantization, model.head_quantization
    if layers is None and head is None:
        return None
    report = QuantizationReport() if layers is None else _of_layers(layers)
    report = msgspec.structs.replace(report, activations=describe_inputs(model.low_bit_weights.values()))
    if head is None:
        return report
    return msgspec.structs.replace(
        report,
        head_scheme=head.scheme.name,
        head_bits_per_weight=head.bits_per_weight,
        head_relative_error=head.mean_relative_error,
    )


def _of_layers(summary: QuantizationSummary | StoredSummary) -> QuantizationReport:
    if isinstance(summary, StoredSummary):
        # The bits are as they were found: how far these are from what they were made of, only who
        # made them knows.
        return QuantizationReport(
            summary.scheme, summary.group_size, summary.bits_per_weight, num_tensors=summary.num_weights
        )
    return QuantizationReport(
        scheme=summary.scheme.name,
        group_size=summary.scheme.group_size,
        bits_per_weight=summary.bits_per_weight,
        mean_relative_error=summary.mean_relative_error,
        worst_relative_error=summary.worst_relative_error,
        worst_tensor=summary.worst_tensor,
        num_tensors=summary.num_tensors,
    )
