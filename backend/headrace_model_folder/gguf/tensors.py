"""The tensors of a GGUF file under Hugging Face's names, which all rooms behind this one use.

Owns the two names of each tensor, and whose rows come in another order: Llama files have the rows
of queries and keys so that the two numbers that are rotated together follow each other, where ours
lie half a head apart.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

from headrace_model_folder.config import ModelConfig
from headrace_model_folder.description import Experts
from headrace_model_folder.errors import InvalidModelFolder, shown
from headrace_model_folder.expected_tensors import WEIGHT_DTYPES
from headrace_model_folder.families.family import Family, GgufNaming
from headrace_model_folder.families.registry import GGUF_FAMILIES
from headrace_model_folder.fields import Fields
from headrace_model_folder.fused_tensors import split_fused
from headrace_model_folder.gguf.experts import down_tensor, expert_records, expert_tensors
from headrace_model_folder.gguf.header import MXFP4_TYPE, GgufHeader, GgufTensor
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
    "self_attn.qkv_proj": "attn_qkv",
    # One logit of each head, which folders do not call a weight.
    "self_attn": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias|sinks)")
# What follows from metadata or was read with them.
_TOLERATED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d{1,4}\.attn_rot_embd")


def gguf_name(name: str, naming: GgufNaming) -> str:
    """GGUF's name of a tensor."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _OUTER[name]
    words = naming.post_attention if match[2] == "post_attention_layernorm" else _OF_LAYER[match[2]]
    return f"blk.{match[1]}.{words}.{match[3].replace('sinks', 'weight')}"


def gguf_family(header: GgufHeader) -> Family:
    """Returns the family that the file says it is of.

    Raises InvalidModelFolder for one that is not served.
    """
    fields = Fields(header.file, header.metadata)
    name = fields.text("general.architecture")
    known = sorted({known for known, _ in GGUF_FAMILIES})
    if name not in known:
        raise fields.error("general.architecture", f"must be one of {', '.join(known)}, is {shown(name)}")
    has_experts = fields.integer(f"{name}.expert_count", 0, 1 << 16, 0) > 0
    family = GGUF_FAMILIES.get((name, has_experts))
    if family is None:
        rule = "must be 0: experts of this architecture are not supported" if has_experts else "must be at least 1"
        raise fields.error(f"{name}.expert_count", rule)
    return family


def gguf_records(folder: pathlib.Path, header: GgufHeader, config: ModelConfig) -> Mapping[str, TensorRecord]:
    """Hugging Face name -> where the tensor lies, each projection by itself.

    Args:
        folder: The file's folder.
        header: The file's header.
        config: What its metadata state.

    Raises:
        InvalidModelFolder: a tensor is missing, misshapen, surplus, or of a type that it can't
            have.
    """
    records: dict[str, TensorRecord] = {}
    naming = _naming(header)
    alternating = _alternating(config) if naming.alternates else {}
    stacks: set[str] = set()
    for layer in config.description.layers:
        stacks.update(expert_tensors(layer))
        records.update(expert_records(header, layer))
    experts = frozenset(records)
    for name, shape in config.description.stored_tensors().items():
        if name in experts:
            continue
        theirs = gguf_name(name, naming)
        tensor = header.tensors.get(theirs)
        if tensor is None:
            raise InvalidModelFolder(f"{header.file}: tensor {shown(theirs)} is missing")
        _check(header.file, theirs, tensor, shape)
        records[name] = TensorRecord(
            header.file, tensor.type.name, shape, tensor.offset, tensor.num_bytes, alternating.get(name, 0)
        )
    known = stacks | {gguf_name(name, naming) for name in records if name not in experts}
    for theirs in header.tensors:
        if theirs not in known and not _TOLERATED.fullmatch(theirs):
            raise InvalidModelFolder(
                f"{header.file}: tensor {shown(theirs)} is surplus: {config.architecture} with these metadata has none"
            )
    return split_fused(folder, config, records)


def shared_blocks(header: GgufHeader, config: ModelConfig) -> tuple[int, int]:
    """Largest blocks, in inputs, of attention's output and of down projections.

    They are `ModelConfig.shared_blocks`.
    """
    layers, naming = config.description.layers, _naming(header)
    outputs = (gguf_name(f"{layer.attention.output.name}.weight", naming) for layer in layers)
    downs = (
        down_tensor(layer) if isinstance(layer.mlp, Experts) else gguf_name(f"{layer.mlp.down.name}.weight", naming)
        for layer in layers
    )
    output, down = (max(header.tensors[name].type.block_inputs for name in names) for names in (outputs, downs))
    return output, down


def _naming(header: GgufHeader) -> GgufNaming:
    naming = gguf_family(header).gguf
    assert naming is not None, "a family that files are of has names there"
    return naming


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
    if tensor.type.name == MXFP4_TYPE:
        raise InvalidModelFolder(
            f"{file}: tensor {shown(name)} has type {MXFP4_TYPE}, which projections of experts alone may have"
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
