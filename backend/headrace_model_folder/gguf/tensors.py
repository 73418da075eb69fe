"""The tensors of a GGUF file under Hugging Face's names, which all rooms behind this one use.

Owns the two names of each tensor, and whose rows come in another order: Llama files have the rows
of queries and keys so that the two numbers that are rotated together follow each other, where ours
lie half a head apart.
"""

from __future__ import annotations

import re

from headrace_model_folder.config import ModelConfig
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.expected_tensors import WEIGHT_DTYPES, expected_tensors
from headrace_model_folder.families.family import GgufNaming
from headrace_model_folder.families.registry import GGUF_FAMILIES
from headrace_model_folder.fields import Fields
from headrace_model_folder.gguf.experts import expert_records, expert_tensors
from headrace_model_folder.gguf.header import GgufHeader, GgufTensor
from headrace_model_folder.safetensors_header import TensorRecord

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
# What follows from metadata or was read with them.
_TOLERATED = re.compile(r"rope_freqs\.weight|blk\.\d{1,4}\.attn_rot_embd")


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor."""
    match = _LAYER_NAME.fullmatch(name)
    return _OUTER[name] if match is None else f"blk.{match[1]}.{_OF_LAYER[match[2]]}.{match[3]}"


def gguf_family(header: GgufHeader) -> GgufNaming:
    """Returns the family that the file says it is of.

    Raises InvalidModelFolder for one that is not served.
    """
    fields = Fields(header.file, header.metadata)
    name = fields.text("general.architecture")
    family = GGUF_FAMILIES.get(name)
    if family is None or family.gguf is None:
        raise fields.error("general.architecture", f"must be one of {', '.join(GGUF_FAMILIES)}, is {shown(name)}")
    return family.gguf


def gguf_records(header: GgufHeader, config: ModelConfig) -> dict[str, TensorRecord]:
    """Hugging Face name -> where the tensor lies.

    Raises:
        InvalidModelFolder: a tensor is missing, misshapen, surplus, or of a type that it can't
            have.
    """
    records: dict[str, TensorRecord] = {}
    alternating = _alternating(config) if gguf_family(header).alternates else {}
    stacks: set[str] = set()
    for layer in config.description.layers:
        stacks.update(expert_tensors(layer))
        records.update(expert_records(header, layer))
    experts = frozenset(records)
    for name, shape in expected_tensors(config).items():
        if name in experts:
            continue
        theirs = gguf_name(name)
        tensor = header.tensors.get(theirs)
        if tensor is None:
            raise InvalidModelFolder(f"{header.file}: tensor {shown(theirs)} is missing")
        _check(header.file, theirs, tensor, shape)
        records[name] = TensorRecord(
            header.file, tensor.type.name, shape, tensor.offset, tensor.num_bytes, alternating.get(name, 0)
        )
    known = stacks | {gguf_name(name) for name in records if name not in experts}
    for theirs in header.tensors:
        if theirs not in known and not _TOLERATED.fullmatch(theirs):
            raise InvalidModelFolder(
                f"{header.file}: tensor {shown(theirs)} is surplus: {config.architecture} with these metadata has none"
            )
    return records


def shared_blocks(header: GgufHeader, config: ModelConfig) -> tuple[int, int]:
    """Largest blocks, in inputs, of attention's output and of down projections.

    They are `ModelConfig.shared_blocks`.
    """
    layers = config.description.layers
    outputs = (gguf_name(f"{layer.attention.output.name}.weight") for layer in layers)
    downs = (
        list(stacks)[-1] if (stacks := expert_tensors(layer)) else gguf_name(f"{layer.mlp.down.name}.weight")
        for layer in layers
    )
    output, down = (max(header.tensors[name].type.block_inputs for name in names) for names in (outputs, downs))
    return output, down


def _check(file: str, name: str, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InvalidModelFolder(
            f"{file}: tensor {shown(name)} has shape {list(tensor.shape)}, {list(shape)} expected from the metadata"
        )
    if len(shape) == 1 and tensor.type.name not in WEIGHT_DTYPES:
        raise InvalidModelFolder(
            f"{file}: tensor {shown(name)} has type {tensor.type.name}, one of {', '.join(WEIGHT_DTYPES)} expected for "
            "norms and biases"
        )


def _alternating(config: ModelConfig) -> dict[str, int]:
    """Name of each tensor of queries and keys -> rows of a head."""
    attentions = config.description.attentions
    return {
        name: attention.head_dim
        for attention in attentions
        for linear in attention.projected[:2]
        for name, _ in linear.tensors()
    }
