"""Looks families up, and does nothing else."""

from __future__ import annotations

from headrace_model_folder.families.exaone4 import EXAONE4
from headrace_model_folder.families.family import Family
from headrace_model_folder.families.gemma3 import GEMMA3, GEMMA3_OF_SEVERAL
from headrace_model_folder.families.gemma4 import (
    GEMMA4,
    GEMMA4_OF_SEVERAL,
    GEMMA4_UNIFIED,
    GEMMA4_UNIFIED_OF_SEVERAL,
)
from headrace_model_folder.families.glm4 import GLM4
from headrace_model_folder.families.llama import LLAMA
from headrace_model_folder.families.mistral import MINISTRAL3, MISTRAL, MISTRAL3_OF_SEVERAL
from headrace_model_folder.families.mixtures.glm4_moe import GLM4_MOE
from headrace_model_folder.families.mixtures.gpt_oss import GPT_OSS
from headrace_model_folder.families.mixtures.mixtral import MIXTRAL
from headrace_model_folder.families.mixtures.qwen_moe import QWEN3_MOE
from headrace_model_folder.families.olmo import OLMO2, OLMO3
from headrace_model_folder.families.phi3 import PHI3
from headrace_model_folder.families.qwen import QWEN2, QWEN3, QWEN3_VL
from headrace_model_folder.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_OF_SEVERAL, QWEN3_5_OF_SEVERAL
from headrace_model_folder.families.seed_oss import SEED_OSS
from headrace_model_folder.families.smollm3 import SMOLLM3

# By Hugging Face class name, in the order in which messages list them.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        MISTRAL3_OF_SEVERAL,
        MINISTRAL3,
        QWEN2,
        QWEN3,
        QWEN3_VL,
        PHI3,
        QWEN3_MOE,
        MIXTRAL,
        GLM4_MOE,
        GPT_OSS,
        SMOLLM3,
        OLMO2,
        OLMO3,
        GLM4,
        SEED_OSS,
        EXAONE4,
        GEMMA3,
        GEMMA3_OF_SEVERAL,
        GEMMA4,
        GEMMA4_OF_SEVERAL,
        GEMMA4_UNIFIED,
        GEMMA4_UNIFIED_OF_SEVERAL,
        QWEN3_5,
        QWEN3_5_OF_SEVERAL,
        QWEN3_5_MOE,
        QWEN3_5_MOE_OF_SEVERAL,
    )
}
# By the name that GGUF files state, and whether layers have experts.
GGUF_FAMILIES: dict[tuple[str, bool], Family] = {
    (family.gguf.name, has_experts): family
    for family in FAMILIES.values()
    if family.gguf is not None
    for has_experts in ((False, True) if family.gguf.has_experts is None else (family.gguf.has_experts,))
}
