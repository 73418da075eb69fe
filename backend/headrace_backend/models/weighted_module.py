"""A module whose parameters a checkpoint fills, with what there is to know of its weights.

Owns the stock of weights by kind, their sum and their bytes. A language model is one, and so is a
head that drafts; who loads and who plans memory needs no more of either.
"""

from __future__ import annotations

from torch import nn

from headrace_backend.layers.sharded_module import ShardedModule, weight_targets
from headrace_backend.quantization.block_linear_weight import BlockLinearWeight
from headrace_backend.quantization.expert_weight import Mxfp4ExpertWeight
from headrace_backend.quantization.head_weight import HeadWeight
from headrace_backend.quantization.low_bit_weight import LowBitWeight
from headrace_backend.quantization.summaries import QuantizationSummary, StoredSummary
from headrace_backend.weights.placement import WeightTarget


class WeightedModule(nn.Module):
    """A module whose weights are empty until a loader has filled `weight_targets`."""

    def take_stock(self, head: HeadWeight | None = None, counts_head: bool = False) -> None:
        """Notes the weights by kind; to be called once all parameters are allocated.

        Args:
            head: The output layer's weight, if that is quantized by itself.
            counts_head: Whether its numbers are parameters of their own, and not an embedding's.
        """
        # How the layers were quantized, once they are; None where they were not.
        self.quantization: QuantizationSummary | StoredSummary | None = None
        # How the output layer was.
        self.head_quantization: QuantizationSummary | None = None
        self.head_weight = head
        # Of the layers.
        self.low_bit_weights = {
            path: weight
            for path, weight in self.named_modules()
            if isinstance(weight, LowBitWeight) and weight is not head
        }
        # Weights in blocks, as a file has them or rounded to such.
        self.block_weights = {
            path: weight for path, weight in self.named_modules() if isinstance(weight, BlockLinearWeight)
        }
        # Weights of experts that a folder has in MXFP4.
        self.mxfp4_weights = {
            path: weight for path, weight in self.named_modules() if isinstance(weight, Mxfp4ExpertWeight)
        }
        # Of this rank; tied embeddings count once.
        self.parameter_count = sum(parameter.numel() for parameter in self.parameters())
        self.parameter_count -= sum(part.num_padding for part in self.modules() if isinstance(part, ShardedModule))
        self.parameter_count += sum(weight.num_weights for weight in self.low_bit_weights.values())
        self.parameter_count += sum(weight.num_block_weights for weight in self.block_weights.values())
        self.parameter_count += sum(weight.num_weights for weight in self.mxfp4_weights.values())
        if head is not None and counts_head:
            self.parameter_count += head.num_weights

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights of this rank."""
        plain = sum(parameter.nbytes for parameter in self.parameters())
        low_bits = sum(weight.num_bytes for weight in self.low_bit_weights.values())
        low_bits += self.head_weight.num_bytes if self.head_weight is not None else 0
        low_bits += sum(weight.num_bytes for weight in self.mxfp4_weights.values())
        return plain + low_bits + sum(weight.num_bytes for weight in self.block_weights.values())

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Checkpoint tensor name -> the place in a parameter that it fills.

        Together they cover every parameter exactly once, without padding.
        """
        targets = weight_targets(self)
        assert sum(target.num_elements for target in targets.values()) == self.parameter_count
        return targets
