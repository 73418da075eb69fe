"""Which settings of `quantize` suit a model: what can be refused before torch is loaded.

Owns the rule and its words; supervisor, backend and worker all ask here. Which sizes there are is
`EngineConfig`'s, what groups are is `headrace_kernels.weight_formats.quantized_weight`'s.
"""

from __future__ import annotations

from headrace_backend.config import QUANTIZE_GROUPS, EngineConfig
from headrace_model_folder import ModelConfig, ModelFolder
from headrace_model_folder.formats.quantization_config import MXFP4

# Inputs of a block of NF4.
NF4_INPUTS = 64


def unsuitable_quantization(config: EngineConfig, model: ModelConfig, gguf_file: str | None = None) -> str | None:
    """Explains why the model can't be quantized as configured; None if it can.

    Args:
        config: The engine's configuration.
        model: The model whose layers are to be quantized.
        gguf_file: The file whose weights have their own bits; None for a folder.
    """
    if config.quantize != "off" and model.quantized_by is not None:
        return (
            f"quantize is {config.quantize}, and the folder is quantized already ({model.quantized_by}); quantize off "
            "works"
        )
    if config.quantize != "off" and gguf_file is not None:
        return (
            f"quantize is {config.quantize}, and {gguf_file} is a GGUF file, whose weights stay as they are; quantize "
            "off works"
        )
    if config.load == "dummy" and model.quantized_by not in (None, MXFP4):
        return (
            f"load is dummy, and config.json says that the folder is quantized ({model.quantized_by}): dummy weights "
            "of few bits are made by quantize, from a config.json without quantization_config"
        )
    if config.quantize_activations == "fp8" and model.description.expert_layers:
        return "quantize_activations is fp8, and experts keep their inputs as they are; auto works"
    if config.quantize == "nf4" and any(experts.down.bias for experts in model.description.expert_layers):
        return "quantize is nf4, in which experts with biases can't be multiplied; quantize int8, fp8 and int4 work"
    if config.quantize not in ("int4", "nf4"):
        return None
    layers = {f"{linear.name}.weight": linear.inputs for linear in model.description.linears}
    for name, num_inputs in layers.items():
        if config.quantize == "nf4" and num_inputs % NF4_INPUTS:
            return (
                f"quantize is nf4, whose blocks of {NF4_INPUTS} do not divide the {num_inputs} inputs of {name}; "
                "quantize int8 and fp8 work"
            )
    if config.quantize == "nf4":
        return None
    for name, num_inputs in layers.items():
        if num_inputs % config.quantize_group:
            suiting = [g for g in QUANTIZE_GROUPS if all(inputs % g == 0 for inputs in layers.values())]
            works = f"quantize_group {suiting[-1]} works" if suiting else "quantize int8 and fp8 work"
            return (
                f"quantize_group is {config.quantize_group}, which does not divide the {num_inputs} inputs of {name}; "
                f"{works}"
            )
    return None


def unsuitable_head(config: EngineConfig, folder: ModelFolder) -> str | None:
    """Explains why the output layer can't be quantized as configured; None if it can.

    The message names a value that works. Other layers may be quantized in the folder already.

    Args:
        config: The engine's configuration.
        folder: The model, with its tensors where they are to be read.
    """
    asked, works = f"quantize_head is {config.quantize_head}", "quantize_head off works"
    if config.quantize_head == "off":
        return None
    if folder.gguf_file is not None:
        return f"{asked}, and {folder.gguf_file} is a GGUF file, whose weights stay as they are; {works}"
    model = folder.config.description
    name = f"{(model.embedding if model.head.tied else model.head).name}.weight"
    record = folder.tensors.get(name)
    if record is not None and record.nf4 is not None:
        return f"{asked}, and {record.file} has {name} in NF4 already; {works}"
    return None
