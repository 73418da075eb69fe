"""One decoder layer: from its original weights and what it reads, to the tensors that are written.

    layer, hidden states -> InputStatistics of each product -> a method -> tensors -> back into the
    layer, as a reader of the folder dequantizes them

Owns the order. GPTQ sees each product's inputs as the products before it, already rounded, give
them: a pass over the text for each of four, of which the last three begin behind the attention,
which is computed once. The others look once, at the original layer. Output errors are those of each
projection alone, on the inputs that it was quantized for. Experts of a mixture come last
(`quantize_experts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headrace_model_folder.description import Experts, Layer
from headrace_quantize.checks import Job
from headrace_quantize.compressed_tensors import matrix_of, tensors_of
from headrace_quantize.decoder_pass import DecoderPass, LoadedLayer
from headrace_quantize.folding import Folding
from headrace_quantize.quantize_experts import ExpertQuantizer, route
from headrace_quantize.rounding import awq, gptq
from headrace_quantize.rounding.numbers import NumberFormat, QuantizedMatrix, round_to_nearest
from headrace_quantize.rounding.statistics import InputStatistics, relative_output_error, rounding_error
from headrace_quantize.source_tensors import SourceTensors
from headrace_quantize.stages import Stage, num_inputs, stages_of, tie

Tensors = dict[str, Tensor]
Note = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class LayerResult:
    """What a layer became."""

    # All of its tensors, by their names in the folder.
    tensors: Tensors
    # Projection -> relative error of its outputs on the calibration text; without text of its
    # weights.
    errors: dict[str, float]
    # `DecoderPass.heads` of the quantized layer over the calibration text, where a method has
    # computed it.
    heads: Tensor | None = None


class LayerQuantizer:
    """Quantizes layers of one model."""

    def __init__(self, job: Job, source: SourceTensors, passes: DecoderPass, note: Note) -> None:
        """Holds nothing of a layer.

        Args:
            job: What is asked for.
            source: The original tensors.
            passes: Runs layers.
            note: Takes lines for the operator.
        """
        self._job, self._config, self._sizes = job, job.config, job.model.config
        self._source, self._passes, self._note = source, passes, note
        self._quantized = frozenset(job.quantized)

    def quantize(self, index: int, layer: LoadedLayer, hidden: Tensor) -> LayerResult:
        """Quantizes a layer, whose weights are then the quantized ones.

        Args:
            index: Its number.
            layer: Loaded.
            hidden: [pieces, tokens, width] what it reads; no pieces without calibration text.

        Raises:
            QuantizeRefused: Inputs are not finite, or a Hessian can't be inverted.
        """
        described, result = self._sizes.description.layers[index], LayerResult({}, {})
        folding = Folding()
        if self._config.method == "gptq":
            self._round_in_turn(described, layer, hidden, result)
        else:
            seen = self._gather(described, layer, hidden, stages_of(described)) if len(hidden) else {}
            if self._config.method == "awq":
                folding = self._search(described, layer, seen)
            self._round_at_once(described, layer, seen, folding, result)
        if isinstance(described.mlp, Experts) and self._has_experts(described.mlp):
            self._round_experts(described.mlp, layer, hidden, result)
        for name in layer.stored:
            if not self._is_quantized(name):
                result.tensors[name] = folding.applied(name, self._source.read(name))
        self.fill(layer, result.tensors)
        return result

    def num_passes(self, index: int) -> int:
        """How often `quantize` passes the calibration text through a layer or a part of it."""
        described = self._sizes.description.layers[index]
        experts = isinstance(described.mlp, Experts) and self._has_experts(described.mlp)
        if self._config.method != "gptq":
            return 1 + experts
        chosen = sum(bool(self._chosen(described, stage)) for stage in stages_of(described))
        return chosen + experts + 1

    def fill(self, layer: LoadedLayer, tensors: Mapping[str, Tensor]) -> None:
        """Gives a layer the weights that a reader of these tensors dequantizes.

        Weights that are not among them stay.
        """
        for name in layer.stored:
            projection = name.removesuffix(".weight")
            if self._is_quantized(name) and f"{projection}.weight_scale" in tensors:
                layer.put(name, matrix_of(projection, tensors, self.format(projection)).dequantized())
            elif not self._is_quantized(name) and name in tensors:
                layer.put(name, tensors[name])

    def format(self, projection: str) -> NumberFormat:
        """The numbers of a projection; scales have the type of its original weight."""
        config = self._config
        is_float = config.scheme == "fp8"
        return NumberFormat(config.number_bits, config.symmetric, is_float, self._source.dtype(f"{projection}.weight"))

    def _is_quantized(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self._quantized

    def _gather(
        self,
        described: Layer,
        layer: LoadedLayer,
        hidden: Tensor,
        stages: Sequence[Stage],
        heads: Tensor | None = None,
    ) -> dict[str, InputStatistics]:
        """Product -> what is known of its inputs."""
        device = self._passes.device
        found = {stage.product: InputStatistics(num_inputs(stage, described), device) for stage in stages}
        self._passes.inputs(layer.module, hidden, {product: one.add for product, one in found.items()}, heads)
        for product, one in found.items():
            name = f"{described.name}.{product}"
            one.check(name)
            if self._config.method == "gptq" and one.tokens < len(one.gram):
                self._note(
                    f"{name}: {one.tokens:,} tokens of calibration for {len(one.gram):,} inputs; more "
                    "--samples tell more of them"
                )
        return found

    def _weight(self, layer: LoadedLayer, name: str) -> Tensor:
        """[outputs, inputs] fp32, a copy."""
        return layer.weight(name).to(torch.float32, copy=True).contiguous()

    def _chosen(self, described: Layer, stage: Stage) -> list[str]:
        names = [f"{described.name}.{projection}" for projection in stage.projections]
        return [name for name in names if name in self._quantized]

    def _has_experts(self, experts: Experts) -> bool:
        """Whether any projection of the experts is quantized."""
        return any(name in self._quantized for names in experts.products for name in names)

    def _round_experts(self, experts: Experts, layer: LoadedLayer, hidden: Tensor, result: LayerResult) -> None:
        """Experts, each by what the router sends to it."""
        text = route(self._passes, layer, hidden, result.heads) if len(hidden) else None
        quantizer = ExpertQuantizer(self._job, layer, text, self._passes.device, self.format)
        quantizer.quantize(experts)
        result.tensors.update(quantizer.tensors)
        result.errors.update(quantizer.errors)
        if self._config.method == "gptq" and quantizer.unseen:
            self._note(
                f"{experts.router.name}: {len(quantizer.unseen)} of {len(experts.experts)} experts read no token of "
                "calibration and are rounded to nearest; more --samples reach more of them"
            )

    def _round_in_turn(self, described: Layer, layer: LoadedLayer, hidden: Tensor, result: LayerResult) -> None:
        """GPTQ, product by product."""
        config = self._config
        stages = stages_of(described)
        for stage in stages:
            if stage is stages[1]:
                # Queries, keys and values are what they will be.
                result.heads = self._passes.heads(layer.module, hidden)
            chosen = self._chosen(described, stage)
            gathered = self._gather(described, layer, hidden, [stage], result.heads) if chosen else {}
            rounded: Tensors = {}
            for name in chosen:
                weight, gram, form = self._weight(layer, name), gathered[stage.product].gram, self.format(name)
                matrix = gptq.quantize(weight, gram, form, config.group, config.damping, config.act_order, name)
                result.errors[name] = relative_output_error(weight, matrix.dequantized(), gram)
                rounded.update(tensors_of(name, matrix))
            self.fill(layer, rounded)
            result.tensors.update(rounded)

    def _search(self, described: Layer, layer: LoadedLayer, seen: Mapping[str, InputStatistics]) -> Folding:
        """AWQ: the scales of the layer."""
        folding = Folding()
        for stage in stages_of(described):
            chosen = self._chosen(described, stage)
            if not chosen:
                continue
            inputs, form = seen[stage.product], self.format(chosen[0])
            weights = [self._weight(layer, name) for name in chosen]
            tied = tie(stage, self._sizes)
            scales = awq.search_scales(weights, inputs.mean_sizes(), inputs.gram, form, self._config.group, tied)
            folding.add(f"{described.name}.", stage, scales, self._sizes)
        return folding

    def _round_at_once(
        self,
        described: Layer,
        layer: LoadedLayer,
        seen: Mapping[str, InputStatistics],
        folding: Folding,
        result: LayerResult,
    ) -> None:
        """RTN and AWQ, all products by what is known of the original layer."""
        for stage in stages_of(described):
            for name in self._chosen(described, stage):
                weight, inputs = self._weight(layer, name), seen.get(stage.product)
                scaled = folding.applied(f"{name}.weight", weight)
                matrix = self._rounded(name, scaled, None if inputs is None else folding.gram(name, inputs.gram))
                dequantized = folding.undone(name, matrix.dequantized())
                result.errors[name] = rounding_error(weight, dequantized, None if inputs is None else inputs.gram)
                result.tensors.update(tensors_of(name, matrix))

    def _rounded(self, name: str, weight: Tensor, gram: Tensor | None) -> QuantizedMatrix:
        if not self._config.clips:
            return round_to_nearest(weight, self.format(name), self._config.group)
        assert gram is not None
        return awq.round_within_ranges(weight, gram, self.format(name), self._config.group)
