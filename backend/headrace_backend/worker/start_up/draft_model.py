"""The draft model or head of a worker before it drafts: how it is built, what its weights take.

Owns what of the configuration and the folder decides that. It has the type and the device of the
model that it drafts for. Ranks share an MTP layer, and a draft model that is large, as they share
the model's layers; of anything else every rank has all. How it is joined to a runner is `drafters`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.draft_rules import draft_ranks, unsuitable_draft
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead
from headrace_backend.models.eagle_head import EagleHead, HeadBuild
from headrace_backend.models.load import load_model, weight_memory
from headrace_backend.models.mtp_head import MtpBuild, MtpHead
from headrace_backend.tp_rules import rank_part, unsuitable_tp
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.progress import Progress
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up.memory_plan import DraftSizes
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_model_folder import Eagle3Folder, ModelConfig, ModelFolder, TensorRecord, open_mtp

# Weights of a draft model from which ranks on GPUs share it. Whole, each pass reads all of them on
# every rank: 8B in bf16 take an H100 5.3 ms by their bytes, and a server of that model on four
# takes 2.0 for a step. Shared, its sums are exposed for some 3 us a layer. Reckoned from these.
_SHARED_FROM_BYTES = 512 << 20


class DraftingBuild(Protocol):
    """A draft model or a head before it is loaded."""

    def memory(self) -> DraftSizes:
        """What the memory plan must know of it."""

    def loaded(self, target: CausalLM, progress: Progress, seed: int) -> CausalLM | DraftHead:
        """The draft model or head with its weights.

        Args:
            target: The model that verifies, loaded.
            progress: Called with (phase, done, total, unit).
            seed: Seed of weights that are noise.

        Raises:
            InvalidModelFolder: A weight can't be read or is not finite.
            QuantizationRefused: Weights do not bear being quantized.
        """


def drafting_build(
    config: EngineConfig,
    target: ModelFolder,
    sizes: WorkerSizes,
    dtype: torch.dtype,
    device: torch.device,
    bits: Schemes,
    shard: Shard,
) -> DraftingBuild | None:
    """Makes the build of what is configured to draft; None where no weights do.

    Args:
        config: The engine's configuration.
        target: The folder of the model that it drafts for.
        sizes: Sizes of steps.
        dtype: The target's type.
        device: The target's device.
        bits: Which of the target's weights are quantized while they are read.
        shard: Which of several ranks has which part of the target.

    Raises:
        StartRefused: It can't draft for the target.
        InvalidModelFolder: The folder has changed since it was checked.
    """
    if not config.drafts_by_passes:
        return None
    if (reason := unsuitable_draft(config, target)) is not None:
        raise StartRefused(reason)
    has_weights = config.load == "folder"
    if config.speculate == "mtp":
        layer = open_mtp(target)
        where = (dtype, device, bits, shard)
        return MtpDraftBuild(mtp_build(layer.config, *where, sizes, layer.tensors), layer if has_weights else None)
    assert config.draft_model is not None, "the configuration names a folder"
    if config.speculate == "eagle":
        opened = Eagle3Folder.open(config.draft_model, require_weights=has_weights)
        num_layers, max_tokens = len(target.config.description.layers), sizes.max_num_batched_tokens
        return EagleBuild(HeadBuild(opened, dtype, device, sizes.max_model_len, num_layers, max_tokens), has_weights)
    folder = ModelFolder.open(config.draft_model, require_weights=has_weights)
    build = draft_build(config, folder.config, dtype, device, shard, sizes, folder.tensors)
    return DraftBuild(build, folder if has_weights else None)


def draft_build(
    config: EngineConfig,
    draft: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    sizes: WorkerSizes,
    records: Mapping[str, TensorRecord],
) -> ModelBuild:
    """The build of a draft model.

    Args:
        config: The engine's configuration, which says its bits and whether ranks share it.
        draft: The draft model's.
        dtype: The target's type.
        device: The target's device.
        shard: Which of several ranks has which part of the target.
        sizes: Sizes of steps.
        records: Its tensors; empty: its weights are noise.
    """
    bits = Schemes.named(config.draft_quantize, 0, "off")
    whole = ModelBuild(draft, dtype, device, bits, ALONE, records, sizes.max_model_len)
    if not _is_shared(config, whole, shard):
        return whole
    return dataclasses.replace(whole, shard=dataclasses.replace(shard, whole_experts=False))


def _is_shared(config: EngineConfig, whole: ModelBuild, shard: Shard) -> bool:
    if shard.world_size == 1 or config.draft_sharing != "auto":
        return shard.world_size > 1 and config.draft_sharing == "shared"
    is_divided = unsuitable_tp(draft_ranks(config), whole.config) is None
    return whole.device.type == "cuda" and is_divided and weight_memory(whole).weights >= _SHARED_FROM_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class DraftBuild:
    """Implements `DraftingBuild` for a draft model."""

    build: ModelBuild
    # The folder that its weights are read from; None: they are seeded noise.
    source: ModelFolder | None

    def memory(self) -> DraftSizes:
        """Implements `DraftingBuild.memory`."""
        world_size = self.build.shard.world_size
        return DraftSizes(
            rank_part(self.build.description, world_size), weight_memory(self.build), num_ranks=world_size
        )

    def loaded(self, target: CausalLM, progress: Progress, seed: int) -> CausalLM:
        """Implements `DraftingBuild.loaded`; a draft model is the same beside any target."""
        return load_model(self.build, self.source, progress, seed)


@dataclasses.dataclass(frozen=True, slots=True)
class EagleBuild:
    """Implements `DraftingBuild` for an EAGLE-3 head."""

    build: HeadBuild
    # Whether the folder's weights are read; else they are seeded noise.
    has_weights: bool

    def memory(self) -> DraftSizes:
        """Implements `DraftingBuild.memory`; a token of the cache has a state beside its keys."""
        model = self.build.folder.head.model
        return DraftSizes(model, self.build.memory(), model.hidden_size * self.build.dtype.itemsize)

    def loaded(self, target: CausalLM, progress: Progress, seed: int) -> EagleHead:
        """Implements `DraftingBuild.loaded`: later steps of the target leave it their streams."""
        return self.build.loaded(self.has_weights, target, progress, seed)


def mtp_build(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    bits: Schemes,
    shard: Shard,
    sizes: WorkerSizes,
    records: Mapping[str, TensorRecord],
) -> MtpBuild:
    """The build of an MTP layer.

    Args:
        config: The layer's (`ModelConfig.mtp`).
        dtype: The target's type.
        device: The target's device.
        bits: Which weights are quantized while they are read; the output layer is the target's.
        shard: Which of several ranks has which part.
        sizes: Sizes of steps.
        records: The layer's tensors; empty: its weights are noise.
    """
    model = ModelBuild(config, dtype, device, bits._replace(head=None), shard, records, sizes.max_model_len)
    return MtpBuild(model, sizes.max_num_batched_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class MtpDraftBuild:
    """Implements `DraftingBuild` for the MTP layer of the target's own folder."""

    build: MtpBuild
    # The folder that its weights are read from; None: they are seeded noise.
    source: ModelFolder | None

    def memory(self) -> DraftSizes:
        """Implements `DraftingBuild.memory`; a token of the cache has a state beside its keys."""
        model, shard = self.build.model, self.build.model.shard
        part = rank_part(model.description, shard.world_size, shard.whole_experts)
        state_bytes = part.hidden_size * model.dtype.itemsize
        return DraftSizes(part, self.build.memory(), state_bytes, shard.world_size)

    def loaded(self, target: CausalLM, progress: Progress, seed: int) -> MtpHead:
        """Implements `DraftingBuild.loaded`: later steps of the target leave it their states."""
        return self.build.loaded(self.source, target, progress, seed)
