"""Formats of a mixture's experts, in folders that another tool quantized.

Products take all experts of a layer together, so gates and ups of a layer are in one format, and
so are its down projections. Owns that rule, the methods that no product of experts has, and what is
true of routers: most tools leave them as they were, and not all of them say so in config.json.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.formats.layer_format import LayerFormat, are_alike
from headrace_model_folder.formats.quantization_config import BITSANDBYTES, MXFP4
from headrace_model_folder.safetensors_header import TensorRecord

# Projection -> its format; what is not here is plain.
Formats = Mapping[str, LayerFormat]
# Names of the projections that one product takes: gates and ups of a layer's experts, or downs.
Products = Iterable[Sequence[str]]


def refuse_other_methods(fields: Fields, is_stacked: bool) -> None:
    """Refuses methods in which a model's experts can't be read.

    Args:
        fields: The fields of config.json, of a model with experts.
        is_stacked: Whether a tensor holds all experts of a layer.

    Raises:
        InvalidModelFolder: The method is not for experts in tensors of their own, or not for
            stacked ones.
    """
    stated = fields.get("quantization_config")
    if not isinstance(stated, dict):
        return
    method = stated.get("quant_method")
    if is_stacked and method != MXFP4:
        raise fields.error(
            "quantization_config", f"must have quant_method {MXFP4!r} for stacked experts, has {shown(method)}"
        )
    if not is_stacked and method in (MXFP4, BITSANDBYTES):
        raise fields.error(
            "quantization_config",
            f"has quant_method {method!r}, in which this mixture of experts is not supported: folders of gptq, awq, "
            "compressed-tensors and fp8 are read, and quantize int8, fp8 and int4 of a plain folder work",
        )


def refuse_mixed_experts(products: Products, formats: Formats) -> None:
    """Refuses experts of one layer that are not all in one format.

    Raises:
        InvalidModelFolder: Two projections are named that differ.
    """
    for names in products:
        first = _kept(formats.get(names[0]))
        for name in names[1:]:
            if not are_alike((first, _kept(formats.get(name)))):
                raise InvalidModelFolder(
                    f"config.json: quantization_config: {names[0]} and {name} are in different formats: experts of one "
                    "layer are multiplied together, and must be in one"
                )


def refuse_ordered_experts(products: Products, formats: Formats) -> None:
    """Refuses experts whose inputs are in an order of groups, which is known once files are read.

    Raises:
        InvalidModelFolder: A projection is named.
    """
    for name in itertools.chain.from_iterable(products):
        form = formats.get(name)
        if form is not None and form.order_digest:
            raise InvalidModelFolder(
                f"config.json: quantization_config: the inputs of {name} are in an order of groups (act-order), in "
                "which experts can't be multiplied"
            )


def without_plain(
    names: Collection[str], formats: Formats, tensors: Mapping[str, TensorRecord]
) -> dict[str, LayerFormat]:
    """Returns the formats without those of projections that the folder has as plain weights.

    Args:
        names: Projections of which config.json may say what is not so, such as routers.
        formats: Projection -> its format, as config.json says.
        tensors: Name -> where the tensor lies.
    """
    plain = {name for name in names if (own := tensors.get(f"{name}.weight")) and own.dtype in ("F32", "F16", "BF16")}
    return {name: form for name, form in formats.items() if name not in plain}


def _kept(form: LayerFormat | None) -> LayerFormat | None:
    """A format without how inputs are rounded, which products of experts never do."""
    return None if form is None else dataclasses.replace(form, inputs=None)
