"""Answers what a model would take on GPUs that need not be here.

`python -m headrace_backend.worker.start_up.plan_sizes` reads one question as JSON from its standard
input and prints the answer.

Owns nothing of the arithmetic: weights are those of a model that is made without memory, the rest
is `memory_plan`'s estimate, as a worker would make it before it allocates. Imports torch, needs no
GPU. `headrace plan` asks.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any, TypeAlias

import msgspec
import torch

from headrace_backend.cache_groups import cache_layout
from headrace_backend.config import EngineConfig
from headrace_backend.draft_rules import unsuitable_mtp
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.eagle_head import HeadBuild
from headrace_backend.models.load import weight_memory
from headrace_backend.pp_rules import Stage, stage_part, stages, unsuitable_pp
from headrace_backend.quantize_rules import unsuitable_quantization
from headrace_backend.state_rules import row_state_bytes, unsuitable_states
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_backend.weights.placement import Shard
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.errors import DoesNotFit
from headrace_backend.worker.start_up.device import choose_dtype
from headrace_backend.worker.start_up.draft_model import (
    DraftBuild,
    EagleBuild,
    MtpDraftBuild,
    draft_build,
    mtp_build,
)
from headrace_backend.worker.start_up.memory_plan import DraftSizes, Room, plan_estimate
from headrace_backend.worker.start_up.sizes import WorkerSizes, fitting_tokens_per_row
from headrace_model_folder import Eagle3Folder, Eagle3Head, ModelConfig, ModelDescription
from headrace_model_folder.config import parse_config
from headrace_model_folder.families.eagle3 import is_eagle3, parse_eagle3
from headrace_model_folder.formats.quantization_config import MXFP4

_CARD = torch.device("cuda", 0)
# The driver's and libraries' own memory of a card, which a worker measures. A guess.
_OTHER_BYTES = 1 << 30
# The same of a rank's part in a group: NCCL's channels, the memory that ranks read of each other. A
# guess too.
_GROUP_BYTES = 512 << 20
_Draft: TypeAlias = ModelConfig | Eagle3Head


class Question(msgspec.Struct):
    """What is asked."""

    # config.json.
    model: dict[str, Any]
    # Fields of EngineConfig, of each engine that is asked about.
    engines: list[dict[str, Any]]
    gpu_bytes: int
    # Numbers of ranks.
    ranks: list[int]
    # config.json of a draft model or head that ranks have beside their parts of the model.
    draft: dict[str, Any] | None = None


class Sizes(msgspec.Struct):
    """What one rank would have; `refused` alone where it can't be.

    Of several pipeline stages, one of the stage that has the least room for a cache.
    """

    tp: int
    quantize: str
    kv_dtype: str
    refused: str = ""
    weight_bytes: int = 0
    # Tables of cosines and sines, which every rank has whole.
    rotary_bytes: int = 0
    activation_bytes: int = 0
    graph_bytes: int = 0
    kv_cache_bytes: int = 0
    # Tokens of one cache group that the cache holds, and bytes of one in the caches of all stages.
    kv_tokens: int = 0
    kv_token_bytes: int = 0
    # Window of each cache group; 0: it keeps whole contexts.
    kv_windows: tuple[int, ...] = (0,)
    # States of one row in the recurrent layers of all stages, and of all rows in those of this one,
    # which lie beside the cache.
    row_state_bytes: int = 0
    state_bytes: int = 0
    # States that are kept for prefixes, and what they take.
    num_checkpoints: int = 0
    checkpoint_bytes: int = 0
    # Of a token's hidden state, which ranks add up.
    token_bytes: int = 0
    # Of the weights of all stages: what a step of many tokens reads, and how many numbers a token
    # is multiplied by.
    read_bytes: int = 0
    multiplied: int = 0
    # Of `read_bytes`, all experts' of all layers, and the share of a layer's experts that compute
    # one token.
    expert_bytes: int = 0
    expert_share: float = 0.0
    # Most rows of a step.
    max_num_seqs: int = 0
    # Pipeline stages.
    pp: int = 1
    # Of all stages.
    num_layers: int = 0


def answers(question: Question) -> list[Sizes]:
    """By engine, and of each by number of ranks."""
    model = parse_config(question.model)
    draft = None if question.draft is None else _parsed_draft(question.draft)
    engines = ({"model": pathlib.Path(), **engine, "device": str(_CARD)} for engine in question.engines)
    return [
        _sizes(EngineConfig(**{**engine, "tp": tp}), model, draft, question.gpu_bytes)
        for engine in engines
        for tp in question.ranks
    ]


def _sizes(config: EngineConfig, model: ModelConfig, draft: _Draft | None, gpu_bytes: int) -> Sizes:
    refusal = Sizes(config.tp, config.quantize, config.kv_dtype, pp=config.pp)
    rules = (unsuitable_quantization, unsuitable_states, unsuitable_tp, unsuitable_pp, unsuitable_mtp)
    for unsuitable in rules:
        if (reason := unsuitable(config, model)) is not None:
            return msgspec.structs.replace(refusal, refused=reason)
    found = []
    for stage in stages(config, model):
        try:
            found.append(_of_stage(config, model, draft, gpu_bytes, stage))
        except DoesNotFit as refused:
            where = "" if config.pp == 1 else f"stage {stage.index} of {config.pp}: "
            return msgspec.structs.replace(refusal, refused=f"{where}{refused}")
    least = min(found, key=lambda sizes: sizes.kv_tokens)
    return msgspec.structs.replace(
        least,
        num_checkpoints=min((sizes.num_checkpoints for sizes in found if sizes.state_bytes), default=0),
        row_state_bytes=sum(sizes.row_state_bytes for sizes in found),
        kv_token_bytes=sum(sizes.kv_token_bytes for sizes in found),
        read_bytes=sum(sizes.read_bytes for sizes in found),
        expert_bytes=sum(sizes.expert_bytes for sizes in found),
    )


def _of_stage(config: EngineConfig, model: ModelConfig, draft: _Draft | None, gpu_bytes: int, stage: Stage) -> Sizes:
    """What one rank of a stage would have. Raises DoesNotFit."""
    tp, described = config.tp, stage_part(model.description, stage)
    dtype = choose_dtype(config.dtype, model, _CARD)
    schemes = Schemes.named(config.quantize, config.quantize_group, config.quantize_head, config.quantize_activations)
    shard = Shard(0, tp, whole_experts=config.expert_parallel)
    weights = weight_memory(ModelBuild(model, dtype, _CARD, schemes, shard, stage=stage))
    other = _OTHER_BYTES + (_GROUP_BYTES if config.num_ranks > 1 else 0)
    room = Room(_CARD, gpu_bytes - other, gpu_bytes, int(config.memory_budget))
    longest = config.max_model_len or model.max_position_embeddings
    layout = cache_layout(config, model, stage, draft is not None)
    tokens_per_row, has_experts = fitting_tokens_per_row(config, model), model.description.has_experts
    sizes = WorkerSizes.of(config, longest, stage, layout, tokens_per_row, has_experts)
    beside = None if draft is None else _beside(config, draft, model, sizes, dtype, shard)
    num_experts = _expert_weights(described)
    if model.mtp is not None and config.speculate == "mtp":
        beside = MtpDraftBuild(mtp_build(model.mtp, dtype, _CARD, schemes, shard, sizes, {}), None).memory()
        num_experts += _expert_weights(model.mtp.description)
    memory, plan = plan_estimate(sizes, rank_part(described, tp, config.expert_parallel), weights, dtype, room, beside)
    is_read = described.head.tied and schemes.head is None
    has_table = stage.is_first and not is_read
    embedding = -(-described.vocab_size // tp) * described.hidden_size if has_table else 0
    return Sizes(
        tp,
        config.quantize,
        config.kv_dtype,
        weight_bytes=memory.weights,
        rotary_bytes=memory.rotary,
        activation_bytes=memory.activations + memory.streams,
        graph_bytes=memory.graphs,
        kv_cache_bytes=plan.kv_cache_bytes,
        kv_tokens=plan.num_blocks * plan.block_size,
        kv_token_bytes=memory.kv_block // plan.block_size,
        kv_windows=tuple(group.window or 0 for group in sizes.cache.groups),
        row_state_bytes=row_state_bytes(rank_part(described, tp)),
        state_bytes=plan.state_bytes,
        num_checkpoints=plan.num_checkpoints,
        checkpoint_bytes=plan.checkpoint_bytes,
        token_bytes=described.hidden_size * dtype.itemsize,
        read_bytes=memory.weights - embedding * dtype.itemsize,
        multiplied=_matrix_numbers(model.description) // tp,
        expert_bytes=int(num_experts // tp * _bits_of_experts(config, model, dtype) / 8),
        expert_share=experts[0].share if (experts := model.description.expert_layers) else 0.0,
        max_num_seqs=config.max_num_seqs,
        pp=config.pp,
        num_layers=len(model.description.layers),
    )


def _parsed_draft(values: dict[str, Any]) -> _Draft:
    """What a draft's config.json says that it is."""
    return parse_eagle3("config.json", values) if is_eagle3(values) else parse_config(values)


def _beside(
    config: EngineConfig, draft: _Draft, model: ModelConfig, sizes: WorkerSizes, dtype: torch.dtype, shard: Shard
) -> DraftSizes:
    """A draft model or head as each rank has it; a head is taken to have no embedding."""
    if isinstance(draft, ModelConfig):
        return DraftBuild(draft_build(config, draft, dtype, _CARD, shard, sizes, {}), None).memory()
    folder = Eagle3Folder(pathlib.Path(), draft, {}, tuple(range(draft.draft_vocab_size)))
    num_layers = len(model.description.layers)
    build = HeadBuild(folder, dtype, _CARD, sizes.max_model_len, num_layers, sizes.max_num_batched_tokens)
    return EagleBuild(build, has_weights=False).memory()


def _matrix_numbers(model: ModelDescription) -> int:
    """Number of weights that a token is multiplied by; of experts, those that compute it.

    The output layer's count even where it is tied.
    """
    return model.multiplied + model.vocab_size * model.hidden_size


def _expert_weights(model: ModelDescription) -> int:
    """Number of weights of all experts."""
    return sum(mixture.size for mixture in model.expert_layers)


def _bits_of_experts(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> float:
    """Bits of one weight of an expert, without scales."""
    if model.quantized_by == MXFP4:
        return 4
    return {"int8": 8, "fp8": 8, "int4": 4}.get(config.quantize, 8 * dtype.itemsize)


def main() -> None:
    """One question, one answer."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(answers(question)))


if __name__ == "__main__":
    main()
