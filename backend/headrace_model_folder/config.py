"""config.json as a frozen dataclass: the family's description, and what all families share.

All have types, token ids, context, and what another tool made of the weights.

Owns the order of reading. What a field means for one family is the family's (`families`). Code of
the folder's own (`auto_map`) is never run, only mentioned; what the fields mean is decided by the
architecture's name alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
from typing import Any, Literal

from headrace_model_folder.bounded_files import MIB, read_json_object
from headrace_model_folder.description import ModelDescription
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.families.decoder import MAX_CONTEXT
from headrace_model_folder.families.family import Family
from headrace_model_folder.families.foreign_fields import refuse_foreign_fields
from headrace_model_folder.families.registry import FAMILIES
from headrace_model_folder.fields import Fields
from headrace_model_folder.formats.bitsandbytes_tensors import GROUP, refuse_other_bitsandbytes
from headrace_model_folder.formats.expert_formats import refuse_mixed_experts, refuse_other_methods
from headrace_model_folder.formats.quantization_config import BITSANDBYTES, FolderQuantization, read_quantization
from headrace_model_folder.rope_config import refuse_two_forms

CONFIG_FILE = "config.json"
_CONFIG_LIMIT = 4 * MIB
# Of an architecture, of which the nearest are looked for.
_LONGEST_NAME = 100
# Names of a list that a message shows.
_MOST_LISTED = 4

DType = Literal["bfloat16", "float16", "float32"]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer and what its folder says of it."""

    # Hugging Face class name, a key of FAMILIES.
    architecture: str
    # The embedding, the layers' parts and the output head, with sizes and tensor names.
    description: ModelDescription
    # Usable context in tokens: the stated one, or what YaRN stretches it to.
    max_position_embeddings: int
    torch_dtype: DType
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    # What another tool made of the layers' weights; None: they are plain, bitsandbytes', or a GGUF
    # file's.
    quantization: FolderQuantization | None = None
    # Whether bitsandbytes quantized the folder's weights: which ones, their tensors say.
    is_bitsandbytes: bool = False
    # Inputs of attention's output and of the down projection that lie in one block, of bitsandbytes
    # or of a GGUF file's types; 1: they are in none.
    shared_blocks: tuple[int, int] = (1, 1)
    # Whether config.json names code of the folder's own, which is never run.
    names_own_code: bool = False
    # The layer that predicts the token after the next, as a model of one layer (`description.mtp`);
    # whether the folder has it, `mtp_folder` finds out.
    mtp: ModelConfig | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.description.vocab_size

    @property
    def quantized_by(self) -> str | None:
        """Who quantized the folder's weights, as config.json spells it; None: nobody, or GGUF."""
        if self.quantization is not None:
            return self.quantization.method
        return BITSANDBYTES if self.is_bitsandbytes else None


def read_config(folder: pathlib.Path) -> ModelConfig:
    """Reads and validates config.json.

    Raises InvalidModelFolder naming the field, the rule and the value.
    """
    return parse_config(read_json_object(folder, CONFIG_FILE, _CONFIG_LIMIT))


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """The config of a parsed config.json.

    Raises InvalidModelFolder naming the field, the rule and the value.
    """
    family = _family(values)
    names_own_code = _names_own_code(values)
    if family.text_part is not None:
        values = family.text_part.values(values)
    stated = Fields(CONFIG_FILE, values)
    _refuse_unsupported(stated, family)
    refuse_foreign_fields(stated, family)
    refuse_two_forms(stated)
    # A null in the file means null (Mistral: no window), so the defaults only fill what is absent.
    fields = Fields(CONFIG_FILE, {**family.defaults, **values})
    _refuse_absent_scaling(stated, family)
    description = family.describe(fields)
    max_position = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    if description.expert_layers:
        refuse_other_methods(fields, all(experts.stacked is not None for experts in description.expert_layers))
    bos = fields.token_ids("bos_token_id", description.vocab_size)
    is_bitsandbytes = _is_bitsandbytes(fields)
    quantization = None if is_bitsandbytes else _quantization(fields, description)
    config = ModelConfig(
        architecture=family.architecture,
        description=description,
        max_position_embeddings=min(
            max(max_position, description.stretched_context), description.context_limit or MAX_CONTEXT
        ),
        torch_dtype=_dtype(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id", description.vocab_size),
        quantization=None if quantization is None else _of_model(quantization, description),
        is_bitsandbytes=is_bitsandbytes,
        shared_blocks=(GROUP, GROUP) if is_bitsandbytes else (1, 1),
        names_own_code=names_own_code,
    )
    if config.quantization is not None:
        refuse_mixed_experts(description.expert_products, config.quantization.layers)
    if description.mtp is None:
        return config
    of_mtp = None if quantization is None else _of_model(quantization, description.mtp)
    mtp = dataclasses.replace(config, description=description.mtp, quantization=of_mtp)
    return dataclasses.replace(config, mtp=mtp)


def _quantization(fields: Fields, model: ModelDescription) -> FolderQuantization | None:
    """The quantization of a folder, which names projections its own way."""
    behind = () if model.mtp is None else model.mtp.stored_linears()
    return read_quantization(fields.get("quantization_config"), [*model.stored_linears(), *behind])


def _of_model(found: FolderQuantization, model: ModelDescription) -> FolderQuantization:
    """What a quantization says of a model's projections, by our names."""
    formats = {linear.name: found.layers.get(linear.stored.name) for linear in model.linears}
    return dataclasses.replace(found, layers={name: form for name, form in formats.items() if form is not None})


def _family(values: dict[str, Any]) -> Family:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise InvalidModelFolder(
            f"{CONFIG_FILE}: architectures must be a list of exactly one name, is {_listed(names)}"
        )
    name = names[0]
    if not isinstance(name, str) or name not in FAMILIES:
        nearest = ", ".join(difflib.get_close_matches(str(name)[:_LONGEST_NAME], FAMILIES, n=3, cutoff=0.0))
        advice = "; code of the folder's own (auto_map) is never run" if _names_own_code(values) else ""
        raise InvalidModelFolder(
            f"{CONFIG_FILE}: architectures must name one of the {len(FAMILIES)} that are served (nearest: {nearest}), "
            f"is {shown(name)}{advice}"
        )
    return FAMILIES[name]


def _listed(names: object) -> str:
    """A list with its entries, as long as they are few."""
    if isinstance(names, list) and len(names) <= _MOST_LISTED:
        return f"[{', '.join(map(shown, names))}]"
    return shown(names)


def _refuse_absent_scaling(stated: Fields, family: Family) -> None:
    """Refuses a rotary scaling of null where a family has one by default: readers differ there."""
    scaling = "rope_scaling"
    if family.defaults.get(scaling) is not None and scaling in stated.values and stated.get(scaling) is None:
        if stated.get("rope_parameters") is None:
            raise stated.error(scaling, "must be an object, or absent for this architecture's own, is null")


def _names_own_code(values: dict[str, Any]) -> bool:
    return bool(values.get("auto_map"))


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    if _is_bitsandbytes(fields):
        refuse_other_bitsandbytes(fields, fields.get("quantization_config"))
    name, known = family.activation_field, family.activations
    if fields.text(name, known[0]) not in known:
        raise fields.error(name, f"must be {known[0]!r}, is {shown(fields.get(name))}")


def _is_bitsandbytes(fields: Fields) -> bool:
    settings = fields.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == BITSANDBYTES


def _dtype(fields: Fields) -> DType:
    value = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    for dtype in ("bfloat16", "float16", "float32"):
        if value in (dtype, f"torch.{dtype}"):
            return dtype
    raise fields.error("torch_dtype", f"must be bfloat16, float16 or float32, is {shown(value)}")
