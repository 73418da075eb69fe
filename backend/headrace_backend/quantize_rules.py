"""Which settings of `quantize` suit a model: what can be refused before torch is loaded.

Owns the rule and its words; supervisor, backend and worker all ask here. Which sizes there are is `EngineConfig`'s, what groups are is `headrace_kernels.quantized_weight`'s.
"""

from __future__ import annotations

from headrace_backend.config import QUANTIZE_GROUPS, EngineConfig
from headrace_model_folder import ModelConfig, expected_tensors


def unsuitable_quantization(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why the model can't be quantized as configured, with a value that works; None if it can.

    Args:
        config: The engine's.
        model: Sizes of its layers.
    """
    if model.quantization is not None:
        if config.quantize != "off":
            return f"quantize is {config.quantize}, and the folder is quantized already ({model.quantization.method}); quantize off works"
        if config.load == "dummy":
            return f"load is dummy, and config.json says that the folder is quantized ({model.quantization.method}): made-up weights of few bits are made by quantize, from a config.json without quantization_config"
    if config.quantize != "int4":
        return None
    layers = {name: shape for name, shape in expected_tensors(model).items() if ".layers." in name and len(shape) == 2}
    for name, (_, num_inputs) in layers.items():
        if num_inputs % config.quantize_group:
            suiting = [g for g in QUANTIZE_GROUPS if all(inputs % g == 0 for _, inputs in layers.values())]
            works = f"quantize_group {suiting[-1]} works" if suiting else "quantize int8 and fp8 work"
            return f"quantize_group is {config.quantize_group}, which does not divide the {num_inputs} inputs of {name}; {works}"
    return None
