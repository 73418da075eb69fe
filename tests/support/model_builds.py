"""Models and the memory of their weights from loose arguments, as tests vary them one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from headrace_backend.models import load as loading
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.progress import Progress
from headrace_backend.weights.scheme import Scheme, Schemes
from headrace_model_folder import ModelConfig, ModelFolder, TensorRecord

# A merged weight of a decoder layer -> its projections, in order, as most families name them.
PROJECTIONS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_model(
    folder: ModelFolder | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load: Literal["folder", "dummy"],
    seed: int,
    progress: Progress,
    max_position: int | None = None,
    scheme: Scheme | None = None,
    shard: Shard = ALONE,
    head: Scheme | None = None,
) -> CausalLM:
    source = folder if load == "folder" else None
    records = source.tensors if source is not None else {}
    build = ModelBuild(config, dtype, device, Schemes(scheme, head), shard, records, max_position)
    return loading.load_model(build, source, progress, seed)


def weight_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    scheme: Scheme | None,
    device: torch.device,
    shard: Shard = ALONE,
    records: Mapping[str, TensorRecord] | None = None,
    head: Scheme | None = None,
) -> loading.WeightMemory:
    return loading.weight_memory(ModelBuild(config, dtype, device, Schemes(scheme, head), shard, records or {}))
