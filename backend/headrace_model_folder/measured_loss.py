"""quantization-report.json: what a folder's quantization cost, as `headrace quantize` measured.

Owns the fields that are read of it, their bounds, and what makes it another folder's. A report
decides nothing about how a model is served, so whoever asks here lets a bad one be, and says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from headrace_model_folder.bounded_files import MIB, exists_inside, read_json_object
from headrace_model_folder.description import Linear
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.folder import ModelFolder
from headrace_model_folder.formats.layer_format import LayerFormat
from headrace_model_folder.safetensors_header import TensorRecord
from headrace_model_folder.tensor_index import read_tensor_index

REPORT_FILE = "quantization-report.json"
# 1,024 layers with all their tensors' names take half of it.
_REPORT_LIMIT = 8 * MIB
_METHODS = ("rtn", "gptq", "awq")
# The one format that `headrace quantize` writes.
_WRITTEN_METHOD = "compressed-tensors"
_MOST_TOKENS = 1 << 48
# A model that gives a text's tokens chances of e^-64 has not read it.
_MOST_NATS = 64.0
# What rounding may make of the sum that is a divergence of 0.
_LEAST_DIVERGENCE = -1e-6
_RELATIVE_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """Quantized layers beside the original ones, on text that was not calibrated on."""

    # rtn, gptq or awq.
    method: str
    # That both models were asked for.
    tokens: int
    perplexity_before: float
    perplexity_after: float
    # Mean KL divergence from the original's distribution to the quantized model's, in nats; at
    # least 0.
    divergence: float
    # Half of its 95% interval; None of a text of one piece.
    divergence_interval: float | None


def read_measured_loss(folder: ModelFolder) -> MeasuredLoss | None:
    """What the folder's report says.

    Args:
        folder: Opened with its weights' headers.

    Returns:
        None if the folder has no report, or one of a run without text.

    Raises:
        InvalidModelFolder: The report is no such report, is not valid, or is another folder's. The
            model can be served all the same.
    """
    if folder.gguf_file is not None or not exists_inside(folder.path, REPORT_FILE):
        return None
    try:
        report = Fields(REPORT_FILE, read_json_object(folder.path, REPORT_FILE, _REPORT_LIMIT))
    except (OSError, RuntimeError) as error:  # A disk that fails, links in a circle.
        raise InvalidModelFolder(f"{REPORT_FILE}: can't be read: {error}") from None
    method = _checked_method(report, folder)
    _check_layers(report, folder)
    _check_sizes(report, folder)
    if "quality" in report.values and report.get("quality") is None:
        return None
    return _measured(method, Fields(f"{REPORT_FILE}: quality", _entries(report, "quality")))


def _checked_method(report: Fields, folder: ModelFolder) -> str:
    """The report's first word of its scheme, whose others must be what config.json says."""
    stated = report.text("scheme")
    method, _, rest = stated.partition(" ")
    if method not in _METHODS:
        raise report.error("scheme", f"must begin with one of {', '.join(_METHODS)}, is {shown(stated)}")
    quantization = folder.config.quantization
    if quantization is None or quantization.method != _WRITTEN_METHOD:
        found = folder.config.quantized_by or "no quantization"
        raise report.error("scheme", f"is {shown(stated)}, config.json has {found}, not {_WRITTEN_METHOD}")
    words = rest.split(", ", 3)[:3]
    for layer, form in quantization.layers.items():
        if words != _words(form):
            raise report.error("scheme", f"is {shown(stated)}, config.json has {', '.join(_words(form))} for {layer}")
    return method


def _words(form: LayerFormat) -> list[str]:
    """A layer's format as `headrace quantize` describes it."""
    groups = f"groups of {form.group_size}" if form.group_size else "a scale per output"
    return [form.number, groups, "symmetric" if form.is_symmetric else "with zero points"]


def _check_layers(report: Fields, folder: ModelFolder) -> None:
    """Refuses a report whose layers, by name, are not those that config.json has quantized."""
    layers = report.get("layers")
    if not isinstance(layers, list) or len(layers) != len(folder.config.description.layers):
        raise report.error(
            "layers", f"must be a list of {len(folder.config.description.layers)} layers, is {shown(layers)}"
        )
    named: set[str] = set()
    for index, layer in enumerate(layers):
        errors = layer.get("errors") if isinstance(layer, dict) else None
        if not isinstance(errors, dict):
            raise report.error("layers", f"must be objects with errors, the one of layer {index} has none")
        named.update(errors)
    if differing := named ^ _quantized(folder).keys():
        first = min(differing)
        where = "the report" if first in named else "config.json"
        raise report.error("layers", f"must be those that config.json has quantized: {shown(first)} is in {where} only")


def _check_sizes(report: Fields, folder: ModelFolder) -> None:
    """Refuses a report that states other sizes than the tensors have."""
    tensors = read_tensor_index(folder.path).tensors
    num_bytes = sum(record.num_bytes for record in tensors.values())
    if report.integer("bytes_after", 0, 1 << 63) != num_bytes:
        raise report.error("bytes_after", f"is {report.get('bytes_after')}, the folder's tensors have {num_bytes}")
    bits, found = report.number("bits_per_weight", 0.0, 64.0), _bits_per_weight(folder, tensors)
    if not math.isclose(bits, found, rel_tol=_RELATIVE_ROUNDING):
        raise report.error("bits_per_weight", f"is {bits:g}, the folder's tensors have {found:g}")


def _bits_per_weight(folder: ModelFolder, tensors: Mapping[str, TensorRecord]) -> float:
    """Bits per weight of the quantized layers, scales and zero points included."""
    layers = _quantized(folder)
    num_bytes = sum(
        record.num_bytes
        for name, record in tensors.items()
        if name.rpartition(".")[0] in layers and not name.endswith(".bias")
    )
    return 8 * num_bytes / sum(linear.size for linear in layers.values())


def _quantized(folder: ModelFolder) -> dict[str, Linear]:
    """The quantized projections as the folder has them, by name."""
    assert folder.config.quantization is not None
    layers = folder.config.quantization.layers
    return {linear.stored.name: linear.stored for linear in folder.config.description.linears if linear.name in layers}


def _entries(report: Fields, key: str) -> dict[str, Any]:
    value = report.get(key)
    if not isinstance(value, dict):
        raise report.error(
            key, f"must be an object or null, is {shown(value)}" if key in report.values else "is missing"
        )
    return value


def _measured(method: str, quality: Fields) -> MeasuredLoss:
    has_interval = quality.get("divergence_interval") is not None
    return MeasuredLoss(
        method=method,
        tokens=quality.integer("tokens", 1, _MOST_TOKENS),
        perplexity_before=quality.number("perplexity_before", 1.0, math.exp(_MOST_NATS)),
        perplexity_after=quality.number("perplexity_after", 1.0, math.exp(_MOST_NATS)),
        divergence=max(quality.number("divergence", _LEAST_DIVERGENCE, _MOST_NATS), 0.0),
        divergence_interval=quality.number("divergence_interval", 0.0, _MOST_NATS) if has_interval else None,
    )
