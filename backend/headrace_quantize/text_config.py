"""config.json of the folder that is written, before what it says of quantization.

Of a model that sees or hears too, the text part alone is quantized and written, as a folder of a
language model: its own fields, and the architecture that such folders name.
"""

from __future__ import annotations

import json
from typing import Any

from headrace_model_folder import ModelFolder
from headrace_model_folder.config import CONFIG_FILE
from headrace_model_folder.families.registry import FAMILIES

# How names of architectures end that have several parts, and those of text alone.
_OF_SEVERAL, _ALONE = "ForConditionalGeneration", "ForCausalLM"


def text_config(model: ModelFolder) -> dict[str, Any]:
    """The fields of the original's config.json, or of its text part."""
    values: dict[str, Any] = json.loads((model.path / CONFIG_FILE).read_text(encoding="utf-8"))
    family = FAMILIES[model.config.architecture]
    if family.text_part is None:
        return values
    # What is absent means what it does in the whole.
    own = {**family.defaults, **family.text_part.values(values)}
    architecture = family.architecture.replace(_OF_SEVERAL, _ALONE)
    if alone := family.text_part.alone:
        architecture, own["model_type"] = alone[own.get("model_type") or next(iter(alone))]
    assert architecture in FAMILIES, "a family whose text is a part has folders of text alone"
    return {**own, "architectures": [architecture]}
