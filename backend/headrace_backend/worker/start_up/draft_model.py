"""The draft model of a worker before it drafts: how it is built, and what its weights take.

Owns what of the configuration and the draft model's folder decides that. Every rank has the whole
draft model, in the type and on the device of the model that it drafts for. How it is joined to a
runner is `drafters`.
"""

from __future__ import annotations

import dataclasses

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.draft_rules import unsuitable_draft
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import load_model, weight_memory
from headrace_backend.weights.progress import Progress
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up.memory_plan import DraftSizes
from headrace_backend.worker.start_up.sizes import WorkerSizes
from headrace_model_folder import ModelFolder


@dataclasses.dataclass(frozen=True, slots=True)
class DraftBuild:
    """A draft model before it is loaded."""

    build: ModelBuild
    # The folder that its weights are read from; None: they are seeded noise.
    source: ModelFolder | None

    @classmethod
    def of(
        cls, config: EngineConfig, target: ModelFolder, sizes: WorkerSizes, dtype: torch.dtype, device: torch.device
    ) -> DraftBuild | None:
        """Makes the build of the configured draft model; None where there is none.

        Raises:
            StartRefused: It can't draft for the target.
            InvalidModelFolder: The folder has changed since it was checked.
        """
        if config.draft_model is None:
            return None
        if (reason := unsuitable_draft(config, target)) is not None:
            raise StartRefused(reason)
        has_weights = config.load == "folder"
        folder = ModelFolder.open(config.draft_model, require_weights=has_weights)
        bits = Schemes.named(config.draft_quantize, 0, "off")
        build = ModelBuild(folder.config, dtype, device, bits, records=folder.tensors, max_position=sizes.max_model_len)
        return cls(build, folder if has_weights else None)

    def memory(self) -> DraftSizes:
        """What the memory plan must know of it."""
        return DraftSizes(self.build.description, weight_memory(self.build))

    def loaded(self, progress: Progress, seed: int) -> CausalLM:
        """The draft model with its weights.

        Raises:
            InvalidModelFolder: A weight can't be read or is not finite.
            QuantizationRefused: Weights do not bear being quantized.
        """
        return load_model(self.build, self.source, progress, seed)
