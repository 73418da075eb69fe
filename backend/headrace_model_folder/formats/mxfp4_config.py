"""What config.json says of a folder whose experts are in MXFP4, and the tensors that hold them.

Such folders have all experts of a layer in stacked tensors (`description.StackedExperts`). A
projection's numbers are `_blocks` of 16 bytes with 32 numbers each, its scales powers of two as
bytes, one for each block.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from headrace_model_folder.errors import shown
from headrace_model_folder.fields import Fields
from headrace_model_folder.formats.layer_format import LayerFormat, Layout
from headrace_model_folder.formats.layer_names import strings

# Inputs that share a scale, and bytes of their numbers.
_GROUP, _GROUP_BYTES = 32, 16
_EXPERTS = ".experts."
# Of a projection in MXFP4, in a folder or a GGUF file.
MXFP4_FORMAT = LayerFormat(Layout.MXFP4, "mxfp4", "group", _GROUP)


def read_mxfp4(fields: Fields, names: Sequence[str]) -> dict[str, LayerFormat]:
    """Formats of the experts' projections; all other layers are plain.

    Args:
        fields: `quantization_config`.
        names: Paths of the projections of all decoder layers.

    Raises:
        InvalidModelFolder: `modules_to_not_convert` names experts.
    """
    layers = {name: MXFP4_FORMAT for name in names if _EXPERTS in name}
    plain = strings(fields.get("modules_to_not_convert"), f"{fields.name}: modules_to_not_convert")
    for experts in sorted({name.partition(_EXPERTS)[0] for name in layers}):
        if (entry := _naming(f"{experts}{_EXPERTS}".removesuffix("."), plain)) is not None:
            raise fields.error(
                "modules_to_not_convert", f"has {shown(entry)}: experts of some layers in MXFP4 are not supported"
            )
    return layers


def _naming(path: str, entries: Sequence[str]) -> str | None:
    """The entry, with `*` for anything, that names the path or what it is in."""
    words = path.split(".")
    beginnings = [".".join(words[:end]) for end in range(1, len(words) + 1)]
    return next((e for e in entries if any(fnmatch.fnmatchcase(beginning, e) for beginning in beginnings)), None)


def mxfp4_shapes(num_experts: int, num_outputs: int, num_inputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that stand in place of a stacked plain one, by the ends of their names.

    Groups of 32 divide the inputs.
    """
    scales = (num_experts, num_outputs, num_inputs // _GROUP)
    return {"_blocks": (*scales, _GROUP_BYTES), "_scales": scales}
