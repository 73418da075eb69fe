"""What config.json says of a folder that another tool quantized: which layer is in which format.

Owns the configurations of GPTQ, AWQ and FP8, and which formats there are; compressed-tensors has a
file of its own. Whether the tensors agree is `expected_tensors`' business.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.formats.compressed_tensors_config import read_compressed_tensors
from headrace_model_folder.formats.layer_format import BLOCK_SIZE, InputFormat, LayerFormat, Layout
from headrace_model_folder.formats.layer_names import (
    LM_HEAD,
    Patterns,
    dotted_parts,
    strings,
)
from headrace_model_folder.formats.mxfp4_config import read_mxfp4

# The method whose folders say per tensor, not per layer, what was quantized: `bitsandbytes_tensors`
# reads them.
BITSANDBYTES = "bitsandbytes"
# The method whose folders have stacked experts in few bits, and all else plain.
MXFP4 = "mxfp4"
_NAME = "config.json: quantization_config"
_GROUP_SIZES = (32, 64, 128)
# Names of projections in a message.
_MOST_LISTED = 8
# What GPTQ may change per layer that says nothing of the file.
_GPTQ_LAYOUT_FIELDS = ("bits", "group_size", "sym", "desc_act")
# Tools that take one from whole words of zero points; others, and the kernels of the format's first
# tool, from each by itself.
_BORROWING_TOOL = "gptqmodel"


@dataclasses.dataclass(frozen=True, slots=True)
class FolderQuantization:
    """Which layers are quantized, and how."""

    # As config.json spells it: gptq, awq, compressed-tensors, fp8 or mxfp4.
    method: str
    # Layer, such as model.layers.0.self_attn.q_proj -> format. Layers that are not here are plain.
    layers: Mapping[str, LayerFormat]


def read_quantization(values: object, names: Sequence[str]) -> FolderQuantization | None:
    """The quantization of a folder; None if it has none.

    Args:
        values: `quantization_config` of config.json, not bitsandbytes'.
        names: Paths of the projections of all decoder layers, in the order of a forward pass.

    Raises:
        InvalidModelFolder: A format, or a way of using it, that can't be served; the field is
            named.
    """
    if values is None:
        return None
    if not isinstance(values, dict):
        raise InvalidModelFolder(f"{_NAME} must be an object, is {shown(values)}")
    fields = Fields(_NAME, values)
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": read_compressed_tensors,
        "fp8": _fp8,
        MXFP4: read_mxfp4,
    }
    method = fields.text("quant_method")
    if method not in readers:
        raise fields.error("quant_method", f"must be one of {', '.join(readers)}, {BITSANDBYTES}, is {shown(method)}")
    layers = readers[method](fields, names)
    if not layers:
        raise InvalidModelFolder(f"{_NAME}: {method} is asked for, and no layer is left that it is for")
    return FolderQuantization(method, layers)


def _group_size(fields: Fields, default: int) -> int:
    """Inputs of a group; 0: all."""
    size = fields.integer("group_size", -1, 1 << 20, default)
    if size != -1 and size not in _GROUP_SIZES:
        raise fields.error("group_size", f"must be one of 32, 64, 128, -1, is {size}")
    return max(size, 0)


def _with_synonyms(fields: Fields, synonyms: Mapping[str, str]) -> Fields:
    """Fields under the names that we ask for; older tools wrote other ones.

    Raises:
        InvalidModelFolder: Both are there, and differ.
    """
    for name, old in synonyms.items():
        values = fields.get(name), fields.get(old)
        if None not in values and _unordered(values[0]) != _unordered(values[1]):
            raise fields.error(
                name, f"is {shown(values[0])}, and {old}, which means the same, differs: {shown(values[1])}"
            )
    known: dict[str, Any] = {name: fields.get(old) for name, old in synonyms.items() if fields.get(name) is None}
    return Fields(fields.name, {**fields.values, **known})


def _unordered(value: object) -> object:
    return sorted(map(repr, value)) if isinstance(value, list) else value


def _gptq(fields: Fields, names: Sequence[str]) -> dict[str, LayerFormat]:
    stated = "checkpoint_format" if fields.get("format") is None else "format"
    fields = _with_synonyms(fields, {"checkpoint_format": "format"})
    form = fields.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise fields.error(stated, f"must be 'gptq' or 'gptq_v2', is {shown(form)}")
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.error("pack_dtype", f"must be 'int32', is {shown(fields.get('pack_dtype'))}")
    if fields.boolean("lm_head", False):
        raise fields.error(
            "lm_head",
            "is true: an output layer that the folder has in few bits is not supported (quantize_head rounds one that "
            "is plain)",
        )
    if fields.boolean("is_marlin_format", False):
        raise fields.error("is_marlin_format", "must be false: other layouts are not read")
    blocks, changes = _gptq_blocks(fields, names), _gptq_changes(fields)
    plain, has_borrows = _gptq_layer(fields, form), _has_borrows(fields)
    layers: dict[str, LayerFormat] = {}
    for name in names:
        if _in_layer(name) not in blocks:
            continue
        own = next((change.fields for change in changes if change.pattern.match(name)), fields)
        if own is not None:
            layer = plain if own is fields else _gptq_layer(own, form)
            layers[name] = dataclasses.replace(layer, has_borrows=layer.is_less_one and has_borrows)
    return layers


def _has_borrows(fields: Fields) -> bool:
    """Whether one of the folder's tools, such as `gptqmodel:2.0.0`, lets zero points borrow."""
    meta = fields.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, dict) else None
    return any(
        isinstance(tool, str) and tool.startswith(_BORROWING_TOOL)
        for tool in (tools if isinstance(tools, list) else [tools])
    )


def _gptq_layer(fields: Fields, form: str) -> LayerFormat:
    bits = fields.integer("bits", 1, 32)
    if bits not in (4, 8):
        raise fields.error("bits", f"must be 4 or 8, is {bits}")
    group_size = _group_size(fields, 128)
    return LayerFormat(
        Layout.GPTQ,
        "int4" if bits == 4 else "int8",
        "group" if group_size else "channel",
        group_size,
        is_symmetric=fields.boolean("sym", True),
        is_less_one=form == "gptq",
        is_ordered=fields.boolean("desc_act", False),
    )


def _in_layer(name: str) -> str:
    """The path of a projection inside its decoder layer."""
    return name.split(".", 3)[3]


def _gptq_blocks(fields: Fields, names: Sequence[str]) -> frozenset[str]:
    """Names inside a decoder layer that are quantized."""
    projections = list(dict.fromkeys(map(_in_layer, names)))
    stages = fields.get("modules_in_block_to_quantize")
    if stages is None:
        return frozenset(projections)
    where = f"{fields.name}: modules_in_block_to_quantize"
    if not isinstance(stages, list):
        raise InvalidModelFolder(f"{where} must be a list of lists of names, is {shown(stages)}")
    # One list, or one for each stage.
    lists = stages if all(isinstance(stage, list) for stage in stages) else [stages]
    blocks = frozenset(name for stage in lists for name in strings(stage, where))
    for name in sorted(blocks.difference(projections)):
        # Of a mixture each expert has projections.
        known = ", ".join(projections[:_MOST_LISTED]) + ", ..." * (len(projections) > _MOST_LISTED)
        raise InvalidModelFolder(f"{where} must be of {known}, has {shown(name)}")
    return blocks


class _Change(NamedTuple):
    """What GPTQ does with layers whose name matches."""

    pattern: re.Pattern[str]
    # None: nothing is quantized.
    fields: Fields | None


def _gptq_changes(fields: Fields) -> list[_Change]:
    """In order: the first that matches counts."""
    dynamic, where = fields.get("dynamic"), f"{fields.name}: dynamic"
    if dynamic is None:
        return []
    if not isinstance(dynamic, dict):
        raise InvalidModelFolder(f"{where} must be an object, is {shown(dynamic)}")
    patterns, changes = Patterns(), []
    for pattern, change in dynamic.items():
        expression = patterns.compiled(pattern.removeprefix("-:").removeprefix("+:"), where)
        if pattern.startswith("-:"):
            changes.append(_Change(expression, None))
        elif isinstance(change, dict):
            values = {key: change.get(key, fields.get(key)) for key in _GPTQ_LAYOUT_FIELDS}
            changes.append(_Change(expression, Fields(f"{where} {shown(pattern)}", values)))
        else:
            raise InvalidModelFolder(f"{where}: {shown(pattern)} must be an object, is {shown(change)}")
    return changes


def _awq(fields: Fields, names: Sequence[str]) -> dict[str, LayerFormat]:
    fields = _with_synonyms(fields, {"bits": "w_bit", "group_size": "q_group_size"})
    if fields.integer("bits", 1, 32, 4) != 4:
        raise fields.error("bits", f"must be 4, is {shown(fields.get('bits'))}")
    for name in ("version", "format"):
        if fields.text(name, "gemm").lower() != "gemm":
            raise fields.error(name, f"must be 'gemm', is {shown(fields.get(name))}: other layouts are not read")
    if fields.get("backend") == "llm-awq":
        raise fields.error("backend", "must not be 'llm-awq', whose layout is not read")
    if not fields.boolean("zero_point", True):
        raise fields.error("zero_point", "must be true")
    group_size = _group_size(fields, 128)
    form = LayerFormat(Layout.AWQ, "int4", "group" if group_size else "channel", group_size, is_symmetric=False)
    plain = strings(fields.get("modules_to_not_convert"), f"{fields.name}: modules_to_not_convert")
    # The format's own tool skips every name that has an entry anywhere in it.
    return {name: form for name in names if not any(entry in name for entry in plain)}


def _fp8(fields: Fields, names: Sequence[str]) -> dict[str, LayerFormat]:
    if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", f"must be 'e4m3', is {shown(fields.get('fmt'))}")
    activations = fields.text("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise fields.error("activation_scheme", f"must be 'dynamic' or 'static', is {shown(activations)}")
    block = fields.get("weight_block_size")
    if block is not None and block != [BLOCK_SIZE, BLOCK_SIZE]:
        raise fields.error("weight_block_size", f"must be [{BLOCK_SIZE}, {BLOCK_SIZE}] or null, is {block!r}"[:120])
    form = LayerFormat(
        Layout.WHOLE,
        "fp8",
        "block" if block else "tensor",
        inputs=_fp8_inputs(activations == "static", is_block=block is not None),
        scale_name="weight_scale_inv" if block else "weight_scale",
    )
    fields = _with_synonyms(fields, {"modules_to_not_convert": "ignored_layers"})
    plain = frozenset(strings(fields.get("modules_to_not_convert"), f"{fields.name}: modules_to_not_convert"))
    assert LM_HEAD not in names
    return {name: form for name in names if dotted_parts(name).isdisjoint(plain)}


def _fp8_inputs(is_static: bool, is_block: bool) -> InputFormat:
    """Dynamic scales are those of a token's inputs in blocks where weights have blocks."""
    if is_static:
        return InputFormat("static")
    return InputFormat("group", BLOCK_SIZE) if is_block else InputFormat("token")
