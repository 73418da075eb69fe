"""The rotary embedding's part of config.json, in both forms.

They are `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).

Owns the parameters and their bounds. The frequencies themselves are computed in
`headrace_kernels.attention.rope`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "none"]
# Those that a config of any family may name.
_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_MAX_FACTOR = 65_536.0
# Parameters that some type has; one that the stated type does not use changes nothing.
_KNOWN = frozenset(
    ("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings")
    + ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale")
    + ("mscale_all_dim", "truncate", "short_factor", "long_factor")
    # Of images, whose places have three numbers: those of a text are alike. And what nobody reads.
    + ("mrope_section", "mrope_interleaved", "finetuned", "max_position_embeddings")
)
# Those that the older form has beside its object; and those that say nothing, or the type.
_BESIDE = frozenset(("rope_theta", "partial_rotary_factor"))
_UNREAD = frozenset(("rope_type", "type", "mrope_section", "mrope_interleaved", "finetuned", "max_position_embeddings"))
# Those of other readers, and what they are where they change nothing.
_QUERY_SCALING = "llama_4_scaling_beta"
_FOREIGN = {"extrapolation_factor": 1, "attn_factor": 1, _QUERY_SCALING: 0}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary embedding. Those that a type does not use keep their defaults.

    `dynamic` only differs from `default` beyond max_position_embeddings, where no request may go.
    `none` turns nothing: layers that have it know no positions, though others of the model do.
    """

    rope_type: RopeType = "default"
    # Base of the geometric series of wavelengths.
    theta: float = 10_000.0
    factor: float = 1.0
    # Tokens of context before stretching (llama3, yarn, longrope).
    original_max_position_embeddings: int = 0
    # llama3: wavelengths between original/high and original/low are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn: rotations over the original context that bound the blend.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # yarn, longrope: multiplies cosine and sine; None: from the factor (and mscale).
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    # yarn: round the bounds of the blend to whole dimensions.
    truncate: bool = True
    # [rotary_dim / 2] default: what each frequency is divided by, where a file states that itself;
    # None: nothing.
    frequency_divisors: tuple[float, ...] | None = None
    # [rotary_dim / 2] longrope: what each default frequency is divided by in contexts up to the
    # original one, and in longer ones.
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    # proportional: share of a head's planes that turn, the first of them; the others keep still.
    proportion: float = 1.0

    @property
    def stretched_context(self) -> int:
        """Tokens that YaRN stretches the original context to; 0 for other types.

        Their config states the usable context itself.
        """
        return int(self.original_max_position_embeddings * self.factor) if self.rope_type == "yarn" else 0


@dataclasses.dataclass(frozen=True, slots=True)
class _RopeFields(Fields):
    """The rotary fields of both places: errors name each where config.json has it."""

    # config.json's own, and which of them stand beside the object.
    beside: Fields
    outside: frozenset[str]

    def error(self, key: str, rule: str) -> InvalidModelFolder:
        """The error for one field; the caller raises it."""
        return self.beside.error(key, rule) if key in self.outside else Fields.error(self, key, rule)


# Of layers without rotation.
NO_ROPE = RopeConfig("none")


def read_rotary_dim(config: Fields, head_dim: int) -> int:
    """Elements of a head that are rotated, as `partial_rotary_factor` says.

    Raises InvalidModelFolder unless they are an even number, at least 2.
    """
    fields = _rope_fields(config)
    factor = fields.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(
            "partial_rotary_factor",
            f"must leave an even number of the {head_dim} elements of a head to be rotated, is {factor:g}",
        )
    return rotary_dim


def refuse_partial_rotation(config: Fields) -> None:
    """For families whose heads are rotated whole. Raises InvalidModelFolder for another factor."""
    fields = _rope_fields(config)
    if fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "must be 1: this architecture rotates whole heads")


def refuse_two_forms(stated: Fields) -> None:
    """Refuses a config that states its rotary embedding in both forms, which contradict each other.

    Raises InvalidModelFolder naming both fields.
    """
    newer, older = stated.get("rope_parameters"), stated.get("rope_scaling")
    if not isinstance(newer, dict) or not isinstance(older, dict):
        return
    nested = newer.get("full_attention")
    said, other = _said(nested if isinstance(nested, dict) else newer), _said(older)
    for key in sorted(said.keys() | other.keys(), key=lambda key: (key != "rope_type", key)):
        # The older form may have the base, and the share that rotates, beside its object.
        if said.get(key) != other.get(key) and (key in other or key not in _BESIDE):
            raise stated.error("rope_scaling", f"must say what rope_parameters says, differs in {shown(key)}")


def _said(stated: dict[str, Any]) -> dict[str, Any]:
    """What the object of a rotary embedding says that changes a result: its type in any case."""
    kind = stated.get("rope_type") or stated.get("type") or "default"
    said = {"rope_type": kind}
    for key, value in stated.items():
        is_read = key in _BESIDE or (kind != "default" and key not in _UNREAD and _FOREIGN.get(key) != value)
        if is_read and value is not None:
            said[key] = value
    return said


def without_query_scaling(config: Fields, most: int) -> tuple[Fields, int | None]:
    """Takes out what multiplies queries behind the original context (`llama_4_scaling_beta`).

    Args:
        config: The fields of config.json.
        most: Bound of the original context.

    Returns:
        The fields without it, and the first position whose queries it would change; None: none.
    """
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    stated = config.get(key)
    if not isinstance(stated, dict) or not stated.get(_QUERY_SCALING):
        return config, None
    fields = Fields(f"{config.name}: {key}", stated)
    fields.number(_QUERY_SCALING, 0.0, 1e3)
    scaled_from = fields.integer("original_max_position_embeddings", 1, most)
    own = {name: value for name, value in stated.items() if name != _QUERY_SCALING}
    return Fields(config.name, {**config.values, key: own}), scaled_from


def by_layer_type(config: Fields, sliding_theta: float) -> tuple[Fields, Fields]:
    """Splits the rotary fields of a model whose layers of a sliding window rotate by their own.

    The newer form has an object for each kind of layer; in the older one the scaling is that of
    layers which see the whole context, and the others have none.

    Args:
        config: The fields of config.json.
        sliding_theta: `rope_theta` of layers with a window, where no object of theirs states it.

    Returns:
        The fields as layers that see the whole context have them, and as layers with a window do;
        `read_rope` takes either.
    """
    nested = config.get("rope_parameters")
    if not isinstance(nested, dict) or not any(isinstance(value, dict) for value in nested.values()):
        if nested:
            raise config.error("rope_parameters", "must have an object for each kind of layer ('full_attention', ...)")
        unscaled = {"rope_parameters": None, "rope_scaling": None, "rope_theta": sliding_theta}
        return config, Fields(config.name, {**config.values, **unscaled})
    if any(kind not in ("full_attention", "sliding_attention") for kind in nested):
        raise config.error("rope_parameters", "must be of 'full_attention' and 'sliding_attention'")
    full, sliding = nested.get("full_attention"), nested.get("sliding_attention")
    return (
        Fields(config.name, {**config.values, "rope_parameters": {} if full is None else full}),
        Fields(
            config.name,
            {**config.values, "rope_theta": sliding_theta, "rope_parameters": {} if sliding is None else sliding},
        ),
    )


def read_rope(config: Fields, max_position: int, rotary_dim: int) -> RopeConfig:
    """The rotary embedding of a config, whose `rotary_dim` elements of a head are rotated.

    Raises InvalidModelFolder for unknown types and values out of range.
    """
    fields = _rope_fields(config)
    rope_type = _rope_type(fields)
    theta = fields.number("rope_theta", 1.0, 1e12, 10_000.0)
    if rope_type in ("default", "dynamic"):
        return RopeConfig(rope_type, theta)
    if rope_type == "longrope":
        return _longrope(fields, theta, max_position, rotary_dim)
    factor = fields.number("factor", 1.0, _MAX_FACTOR)
    if rope_type == "linear":
        return RopeConfig(rope_type, theta, factor)
    original = fields.integer("original_max_position_embeddings", 1, 1 << 26, max_position)
    if rope_type == "llama3":
        low = fields.number("low_freq_factor", 1e-6, 1e6)
        high = fields.number("high_freq_factor", 1e-6, 1e6)
        if high <= low:
            raise fields.error("high_freq_factor", f"must be above low_freq_factor ({low:g}), is {high:g}")
        return RopeConfig(rope_type, theta, factor, original, low, high)
    return _yarn(fields, theta, factor, original)


def read_proportional_rope(config: Fields) -> RopeConfig | None:
    """The rotary embedding of a config of the type `proportional`; None: it has another type.

    Heads are rotated whole, but only a share of their planes has a frequency other than 0.
    """
    fields = _rope_fields(config)
    if fields.get("rope_type") != "proportional":
        return None
    return RopeConfig(
        "proportional",
        fields.number("rope_theta", 1.0, 1e12, 10_000.0),
        fields.number("factor", 1.0, _MAX_FACTOR, 1.0),
        proportion=fields.number("partial_rotary_factor", 0.0, 1.0, 1.0),
    )


def _rope_fields(config: Fields) -> Fields:
    """The rotary fields in one object, whichever form the file has."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    stated: Any = config.get(key)
    if stated is None:
        stated = {}
    if not isinstance(stated, dict):
        raise config.error(key, f"must be an object, is {shown(stated)}")
    if any(isinstance(value, dict) for value in stated.values()):
        raise config.error(key, "holds parameters per layer type, which is not supported")
    outer = {
        name: config.get(name) for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    }
    own = {k: v for k, v in stated.items() if v is not None}
    outside = frozenset(name for name, value in outer.items() if value is not None and name not in own)
    fields = _RopeFields(f"{config.name}: {key}", {**outer, **own}, config, outside)
    for name, value in own.items():
        if name not in _KNOWN and _FOREIGN.get(name) != value:
            raise fields.error(shown(name), f"is not known, is {shown(value)}")
    original = "original_max_position_embeddings"
    if outer[original] is not None and own.get(original, outer[original]) != outer[original]:
        raise fields.error(original, f"must be that beside it ({shown(outer[original])}), is {shown(own[original])}")
    return fields


def _rope_type(fields: Fields) -> RopeType:
    value = fields.get("rope_type") or fields.get("type") or "default"
    for rope_type in _TYPES:
        if value == rope_type:
            return rope_type
    raise fields.error("rope_type", f"must be one of {', '.join(_TYPES)}, is {shown(value)}")


def _longrope(fields: Fields, theta: float, max_position: int, rotary_dim: int) -> RopeConfig:
    original = fields.integer("original_max_position_embeddings", 2, 1 << 26, max_position)
    return RopeConfig(
        "longrope",
        theta,
        # Stated by few: the context that the config allows says it.
        fields.number("factor", 1.0, _MAX_FACTOR, max(1.0, max_position / original)),
        original,
        attention_factor=None
        if fields.get("attention_factor") is None
        else fields.number("attention_factor", 1e-6, 1e6),
        short_divisors=_divisors(fields, "short_factor", rotary_dim),
        long_divisors=_divisors(fields, "long_factor", rotary_dim),
    )


def _divisors(fields: Fields, key: str, rotary_dim: int) -> tuple[float, ...]:
    values = fields.get(key)
    if not isinstance(values, list) or len(values) != rotary_dim // 2:
        raise fields.error(
            key, f"must be a list of {rotary_dim // 2} numbers, one for each pair of a head's rotated dimensions"
        )
    # As fields of their own, so that each is held to the same rules as any number.
    numbered = Fields(f"{fields.name}: {key}", {str(place): value for place, value in enumerate(values)})
    return tuple(numbered.number(str(place), 1e-6, 1e6) for place in range(len(values)))


def _yarn(fields: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    if theta <= 1.0:
        raise fields.error("rope_theta", f"must be above 1 for yarn, is {theta:g}")

    def optional(key: str) -> float | None:
        # transformers takes 0 for "not stated" here.
        return fields.number(key, 0.0, 1e6) if fields.get(key) else None

    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=fields.boolean("truncate", True),
    )
