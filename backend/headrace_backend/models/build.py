"""What decides which parameters a model allocates, in one struct.

It is made once when a worker starts, and goes whole to who plans memory and to who loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.pp_rules import WHOLE, Stage, stage_part
from headrace_backend.weights.block_records import block_kinds, mxfp4_formats
from headrace_backend.weights.placement import ALONE, Placement, Shard
from headrace_backend.weights.scheme import Schemes
from headrace_model_folder import ModelConfig, ModelDescription, TensorRecord


@dataclasses.dataclass(frozen=True, slots=True)
class ModelBuild:
    """One rank's model before it exists."""

    # The model's description, and what another tool made of its layers.
    config: ModelConfig
    # Type of weights and activations.
    dtype: torch.dtype
    # Device that holds the parameters.
    device: torch.device
    # Which weights are quantized while they are read.
    bits: Schemes = Schemes()
    # Which of several ranks has which part.
    shard: Shard = ALONE
    # The checkpoint's tensors, of which some may be in blocks; empty: none is.
    records: Mapping[str, TensorRecord] = dataclasses.field(default_factory=dict)
    # Tokens of context to prepare for; None: the model's own limit.
    max_position: int | None = None
    # Which of several pipeline stages has which layers.
    stage: Stage = WHOLE

    def __post_init__(self) -> None:
        limit = self.config.max_position_embeddings
        if self.max_position is not None and not 1 <= self.max_position <= limit:
            raise ValueError(f"max_position must be from 1 to {limit} (the model's context), is {self.max_position}")

    @property
    def description(self) -> ModelDescription:
        """The part of the model that the stage has, which its ranks share."""
        return stage_part(self.config.description, self.stage)

    @property
    def placement(self) -> Placement:
        """Type, device and rank of the parameters, with what folder or file say of their bits."""
        quantization = self.config.quantization
        return Placement(
            self.dtype,
            self.device,
            self.shard,
            scheme=self.bits.layers,
            head_scheme=self.bits.head,
            formats=quantization.layers if quantization else mxfp4_formats(self.records),
            blocks=block_kinds(self.records),
        )

    def empty_model(self) -> CausalLM:
        """Allocates the model; its weights are still to be filled.

        Raises QuantizationRefused where the bits do not suit the model.
        """
        limit = self.config.max_position_embeddings
        return CausalLM(self.description, self.placement, self.max_position or limit, self.stage)

    def weightless_model(self) -> CausalLM:
        """The model with parameters that take no memory: its sizes are those of `empty_model`.

        Raises QuantizationRefused where the bits do not suit the model.
        """
        on_meta = dataclasses.replace(self.placement, device=torch.device("meta"))
        return CausalLM(self.description, on_meta, 1, self.stage)
