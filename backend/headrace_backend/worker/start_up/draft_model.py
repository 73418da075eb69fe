"""The draft model or head of a worker before it drafts: how it is built, what its weights take.

Owns what of the configuration and the folder decides that. Every rank has all of it, in the type
and on the device of the model that it drafts for. How it is joined to a runner is `drafters`.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.draft_rules import unsuitable_draft
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead
from headrace_backend.models.eagle_head import EagleHead, HeadBuild
from headrace_backend.models.load import load_model, weight_memory
from headrace_backend.weights.progress import Progress
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up.memory_plan import DraftSizes
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_model_folder import Eagle3Folder, ModelFolder


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
    config: EngineConfig, target: ModelFolder, sizes: WorkerSizes, dtype: torch.dtype, device: torch.device
) -> DraftingBuild | None:
    """Makes the build of what is configured to draft; None where no weights do.

    Raises:
        StartRefused: It can't draft for the target.
        InvalidModelFolder: The folder has changed since it was checked.
    """
    if config.draft_model is None:
        return None
    if (reason := unsuitable_draft(config, target)) is not None:
        raise StartRefused(reason)
    has_weights = config.load == "folder"
    if config.speculate == "eagle":
        opened = Eagle3Folder.open(config.draft_model, require_weights=has_weights)
        num_layers, max_tokens = len(target.config.description.layers), sizes.max_num_batched_tokens
        return EagleBuild(HeadBuild(opened, dtype, device, sizes.max_model_len, num_layers, max_tokens), has_weights)
    folder = ModelFolder.open(config.draft_model, require_weights=has_weights)
    bits = Schemes.named(config.draft_quantize, 0, "off")
    build = ModelBuild(folder.config, dtype, device, bits, records=folder.tensors, max_position=sizes.max_model_len)
    return DraftBuild(build, folder if has_weights else None)


@dataclasses.dataclass(frozen=True, slots=True)
class DraftBuild:
    """Implements `DraftingBuild` for a draft model."""

    build: ModelBuild
    # The folder that its weights are read from; None: they are seeded noise.
    source: ModelFolder | None

    def memory(self) -> DraftSizes:
        """Implements `DraftingBuild.memory`."""
        return DraftSizes(self.build.description, weight_memory(self.build))

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
