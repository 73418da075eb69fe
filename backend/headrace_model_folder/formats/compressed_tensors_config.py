"""The configuration of compressed-tensors: groups of layers, each with its scheme.

Owns which of its schemes are served and which layer is in which group: a layer that `ignore` names
is plain; among groups its own name goes before a pattern, and a pattern before the class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.formats.layer_format import BLOCK_SIZE, InputFormat, LayerFormat, Layout
from headrace_model_folder.formats.layer_names import LM_HEAD, Patterns, strings

# Where the numbers are, and of which types.
_FORMATS = {
    "pack-quantized": (Layout.PACKED, ("int",)),
    "int-quantized": (Layout.WHOLE, ("int",)),
    "naive-quantized": (Layout.WHOLE, ("int", "float")),
    "float-quantized": (Layout.WHOLE, ("float",)),
}
# Tools of 2024 wrote numbers and called them frozen; the types of the tensors tell whether they are
# numbers.
_STATUSES = ("compressed", "frozen")
_GROUP_SIZES = (32, 64, 128)
_CLASS = "Linear"
_PATTERN = "re:"
_MOST_GROUPS = 64


class _Names(NamedTuple):
    """Layers that a list names."""

    exact: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def rank(self, name: str) -> int:
        """How exactly it names a layer: 3 by name, 2 by pattern, 1 by class, 0 not at all."""
        if name in self.exact:
            return 3
        return 2 if any(pattern.match(name) for pattern in self.patterns) else int(_CLASS in self.exact)


class _Group(NamedTuple):
    """Layers of one scheme."""

    targets: _Names
    form: LayerFormat


def read_compressed_tensors(fields: Fields, names: Sequence[str]) -> dict[str, LayerFormat]:
    """Layer -> format.

    Raises:
        InvalidModelFolder: What can't be served; the field is named.
    """
    _refuse_unsupported(fields)
    patterns = Patterns()
    groups = _groups(fields, patterns)
    ignored = _names(fields.get("ignore"), f"{fields.name}: ignore", patterns)
    layers: dict[str, LayerFormat] = {}
    for name in [*names, LM_HEAD]:
        if ignored.rank(name):
            continue
        ranks = [group.targets.rank(name) for group in groups]
        forms = {group.form for group, rank in zip(groups, ranks, strict=True) if rank == max(ranks) > 0}
        if len(forms) > 1:
            raise fields.error("config_groups", f"has several groups for {name}")
        if forms and name == LM_HEAD:
            raise fields.error(
                "ignore",
                f"must name {LM_HEAD}, which is in a group: an output layer that the folder has in few bits is not "
                "supported (quantize_head rounds one that is plain)",
            )
        if forms:
            layers[name] = forms.pop()
    return layers


def _refuse_unsupported(fields: Fields) -> None:
    status = fields.text("quantization_status", "compressed")
    if status not in _STATUSES:
        raise fields.error("quantization_status", f"must be 'compressed' or 'frozen', is {shown(status)}")
    if fields.get("kv_cache_scheme") is not None:
        raise fields.error("kv_cache_scheme", "is set: caches with scales from the folder are not supported")
    sparsity = fields.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense"):
        raise fields.error("sparsity_config", "must be absent, empty or 'dense': sparse weights are not supported")
    transforms = fields.get("transform_config")
    if transforms and (not isinstance(transforms, dict) or transforms.get("config_groups")):
        raise fields.error("transform_config", "is set: transformed activations are not supported")


def _names(value: object, where: str, patterns: Patterns) -> _Names:
    entries = strings(value, where)
    found = [entry.removeprefix(_PATTERN) for entry in entries if entry.startswith(_PATTERN)]
    return _Names(frozenset(entries), tuple(patterns.compiled(pattern, where) for pattern in found))


def _groups(fields: Fields, patterns: Patterns) -> list[_Group]:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not 1 <= len(groups) <= _MOST_GROUPS:
        raise fields.error("config_groups", f"must be an object of 1 to {_MOST_GROUPS} groups, is {shown(groups)}")
    found = []
    for key, group in groups.items():
        name = f"{fields.name}: config_groups: {key[:80]}"
        if not isinstance(group, dict):
            raise InvalidModelFolder(f"{name} must be an object, is {shown(group)}")
        scheme = Fields(name, group)
        stated = scheme.get("format") or fields.get("format")
        form = _form(scheme, _known_format(scheme if scheme.get("format") else fields, stated))
        found.append(_Group(_names(group.get("targets"), f"{name}: targets", patterns), form))
    return found


def _known_format(fields: Fields, stated: object) -> str:
    if not isinstance(stated, str) or stated not in _FORMATS:
        raise fields.error("format", f"must be one of {', '.join(_FORMATS)}, is {shown(stated)}")
    return stated


def _form(scheme: Fields, stated: str) -> LayerFormat:
    if scheme.get("output_activations") is not None:
        raise scheme.error("output_activations", "is set, which is not supported")
    weights = _arguments(scheme, "weights")
    if weights is None:
        raise scheme.error("weights", "is missing")
    layout, kinds = _FORMATS[stated]
    number = _number(weights)
    if weights.text("type", "int") not in kinds:
        raise weights.error("type", f"must be {' or '.join(map(repr, kinds))} in the format '{stated}'")
    scales, group_size = _strategy(weights)
    _check_strategy(weights, number, scales)
    order = _order(weights, scales)
    symmetric = weights.boolean("symmetric", True)
    if number == "fp8" and not symmetric:
        raise weights.error("symmetric", "must be true where type is 'float'")
    if weights.get("dynamic"):
        raise weights.error("dynamic", "must be false")
    return LayerFormat(
        layout, number, scales, group_size, is_symmetric=symmetric, is_ordered=order, inputs=_inputs(scheme, number)
    )


def _arguments(scheme: Fields, key: str) -> Fields | None:
    value = scheme.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise scheme.error(key, f"must be an object, is {shown(value)}")
    return Fields(f"{scheme.name}: {key}", value)


def _number(weights: Fields) -> Literal["int4", "int8", "fp8"]:
    bits, kind = weights.integer("num_bits", 1, 64, 8), weights.text("type", "int")
    numbers: Mapping[tuple[str, int], Literal["int4", "int8", "fp8"]]
    numbers = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}
    if (kind, bits) not in numbers:
        raise weights.error(
            "num_bits", f"must be 4 or 8 of type 'int' or 8 of type 'float', is {bits} of {shown(kind)}"
        )
    return numbers[kind, bits]


def _strategy(weights: Fields) -> tuple[Literal["tensor", "channel", "group", "block"], int]:
    """What shares a scale, and the inputs of a group."""
    size = weights.get("group_size")
    stated = weights.get("strategy")
    if stated is None:
        # As the format's own tool infers it.
        stated = "tensor" if size is None else "channel" if size == -1 else "group"
    if stated == "group":
        return "group", _group_size(weights)
    if stated not in ("tensor", "channel", "block"):
        raise weights.error("strategy", f"must be 'tensor', 'channel', 'group' or 'block', is {shown(stated)}")
    if size not in (None, -1):
        raise weights.error("group_size", f"must be absent or -1 where strategy is {shown(stated)}, is {shown(size)}")
    if stated == "block":
        if weights.get("block_structure") not in ([BLOCK_SIZE, BLOCK_SIZE], f"{BLOCK_SIZE}x{BLOCK_SIZE}"):
            raise weights.error("block_structure", f"must be [{BLOCK_SIZE}, {BLOCK_SIZE}], is another")
        return "block", 0
    return ("tensor", 0) if stated == "tensor" else ("channel", 0)


def _check_strategy(weights: Fields, number: str, scales: str) -> None:
    if scales == "block" and number != "fp8":
        raise weights.error("strategy", "must not be 'block' where type is 'int'")
    if scales == "group" and number == "fp8":
        raise weights.error("strategy", "must be 'tensor', 'channel' or 'block' where type is 'float', is 'group'")
    if scales == "tensor" and number != "fp8" and not weights.boolean("symmetric", True):
        raise weights.error("symmetric", "must be true where strategy is 'tensor'")


def _order(weights: Fields, scales: str) -> bool:
    """Whether the folder says which group an input is in."""
    value: Any = weights.get("actorder")
    if value in (None, False, "weight", "static"):
        return False
    if value not in (True, "group", "dynamic"):
        raise weights.error("actorder", f"must be 'group', 'weight', 'dynamic', 'static' or null, is {shown(value)}")
    if scales != "group":
        raise weights.error("actorder", "is for strategy 'group'")
    return True


def _inputs(scheme: Fields, number: str) -> InputFormat | None:
    """How inputs are rounded; None: not at all."""
    inputs = _arguments(scheme, "input_activations")
    if inputs is None:
        return None
    _check_input_number(inputs, number)
    if not isinstance(inputs.get("dynamic") or False, bool):
        raise inputs.error("dynamic", f"must be true or false, is {shown(inputs.get('dynamic'))}")
    symmetric = inputs.boolean("symmetric", True)
    if number != "int8" and not symmetric:
        raise inputs.error("symmetric", "must be true where type is 'float'")
    stated = inputs.get("strategy") or ("tensor" if inputs.get("group_size") is None else "group")
    if not inputs.get("dynamic"):
        if stated != "tensor":
            raise inputs.error("strategy", f"must be 'tensor' where dynamic is false, is {shown(stated)}")
        return InputFormat("static", is_symmetric=symmetric)
    if stated == "group":
        return InputFormat("group", _group_size(inputs), symmetric)
    if stated not in ("token", "tensor"):
        raise inputs.error(
            "strategy", f"must be 'token', 'tensor' or 'group' where dynamic is true, is {shown(stated)}"
        )
    # A scale of all tokens that are computed together would make an answer depend on who else is
    # served: each token has its own.
    return InputFormat("token", is_symmetric=symmetric)


def _check_input_number(inputs: Fields, number: str) -> None:
    bits, kind = inputs.integer("num_bits", 1, 64, 8), inputs.text("type", "int")
    if bits == 8 and number in {"int": ("int8",), "float": ("fp8", "int4")}.get(kind, ()):
        return
    raise inputs.error(
        "num_bits",
        f"is {bits} of type {shown(kind)}, and weights are {number}: inputs are rounded to 8 bits, of type 'int' "
        "beside int8 and 'float' beside fp8 and int4",
    )


def _group_size(arguments: Fields) -> int:
    size = arguments.integer("group_size", 1, 1 << 20)
    if size not in _GROUP_SIZES:
        raise arguments.error("group_size", f"must be one of 32, 64, 128, is {size}")
    return size
