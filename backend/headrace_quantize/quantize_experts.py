"""The experts of one decoder layer: what each reads of the text, and the tensors that are written.

    layer, hidden states -> inputs and chosen experts of all tokens, kept on the host
                         -> expert by expert: gate and up, then down on what those give

Owns the order. Each expert is calibrated on the tokens that the router sends to it alone, which are
gathered once for all of them. One that calibration never reaches is rounded to nearest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headrace_backend.layers.expert_mlp import ExpertMlp
from headrace_model_folder.description import Experts, Linear, Mlp
from headrace_quantize.checks import Job
from headrace_quantize.compressed_tensors import tensors_of
from headrace_quantize.decoder_pass import DecoderPass, LoadedLayer
from headrace_quantize.rounding import gptq
from headrace_quantize.rounding.numbers import NumberFormat, QuantizedMatrix, round_to_nearest
from headrace_quantize.rounding.statistics import InputStatistics, rounding_error


@dataclasses.dataclass(slots=True)
class RoutedText:
    """What the experts of a layer read of the calibration text, on the host."""

    # Pieces of [tokens, hidden_size], and of [tokens, experts of a token].
    inputs: list[Tensor] = dataclasses.field(default_factory=list)
    experts: list[Tensor] = dataclasses.field(default_factory=list)

    def of(self, expert: int) -> Iterator[Tensor]:
        """The inputs of the tokens that chose an expert, piece by piece, those without left out."""
        for inputs, experts in zip(self.inputs, self.experts, strict=True):
            own = inputs[(experts == expert).any(1)]
            if len(own):
                yield own


def route(passes: DecoderPass, layer: LoadedLayer, hidden: Tensor, heads: Tensor | None) -> RoutedText:
    """Passes the text through a layer up to its experts.

    Args:
        passes: Runs layers.
        layer: Its attention as it is by now; with a mixture of experts.
        hidden: [pieces, tokens, width] what the layer reads.
        heads: `DecoderPass.heads` of the layer and text; None: it is computed.
    """
    mlp, text = _mixture(layer), RoutedText()

    def take(x: Tensor) -> None:
        text.inputs.append(x.cpu())
        text.experts.append(mlp.choose(x).experts.cpu())

    passes.inputs(layer.module, hidden, {"mlp": take}, heads)
    return text


class ExpertQuantizer:
    """Quantizes the experts of one layer."""

    def __init__(
        self,
        job: Job,
        layer: LoadedLayer,
        text: RoutedText | None,
        device: torch.device,
        form: Callable[[str], NumberFormat],
    ) -> None:
        """Computes nothing yet.

        Args:
            job: What is asked for.
            layer: With the original's experts; GPTQ leaves rounded ones in it.
            text: What they read; None: there is no text.
            device: Device to compute on.
            form: Projection -> format of its numbers.
        """
        self._config, self._quantized = job.config, frozenset(job.quantized)
        self._layer, self._mlp, self._text, self._device, self._form = layer, _mixture(layer), text, device, form
        self.tensors: dict[str, Tensor] = {}
        # Projection -> relative error of its outputs on the text that it reads, or of its weights.
        self.errors: dict[str, float] = {}
        # Numbers of the experts that no token of the text chose.
        self.unseen: list[int] = []

    def quantize(self, experts: Experts) -> None:
        """Rounds each expert's projections, but for those that are kept."""
        for number, expert in enumerate(experts.experts):
            if not {linear.name for linear in expert.linears} & self._quantized:
                continue
            own = [] if self._text is None else list(self._text.of(number))
            if self._text is not None and not own:
                self.unseen.append(number)
            self._quantize(expert, number, own)

    def _quantize(self, expert: Mlp, number: int, inputs: list[Tensor]) -> None:
        read = self._statistics(expert.gate, inputs)
        # RTN is judged by the original's inputs, GPTQ by those that rounded gates and ups give.
        inner = [] if self._config.method == "gptq" else self._inner(number, inputs)
        for linear in (expert.gate, expert.up):
            self._round(linear, read)
        if self._config.method == "gptq":
            inner = self._inner(number, inputs)
        self._round(expert.down, self._statistics(expert.down, inner))

    def _inner(self, number: int, inputs: list[Tensor]) -> list[Tensor]:
        """Inner elements of an expert as it is by now, on the host."""
        return [self._mlp.inner(x.to(self._device), number).cpu() for x in inputs]

    def _statistics(self, linear: Linear, inputs: list[Tensor]) -> InputStatistics | None:
        if not inputs:
            return None
        found = InputStatistics(linear.inputs, self._device)
        for x in inputs:
            found.add(x.to(self._device))
        found.check(linear.name)
        return found

    def _round(self, linear: Linear, read: InputStatistics | None) -> None:
        if linear.name not in self._quantized:
            return
        target = self._layer.targets[f"{linear.name}.weight"].tensor
        weight = target.to(torch.float32, copy=True).contiguous()
        matrix = self._rounded(linear.name, weight, read)
        dequantized = matrix.dequantized()
        self.errors[linear.name] = rounding_error(weight, dequantized, None if read is None else read.gram)
        self.tensors.update(tensors_of(linear.name, matrix))
        if self._config.method == "gptq":
            target.copy_(dequantized)

    def _rounded(self, name: str, weight: Tensor, read: InputStatistics | None) -> QuantizedMatrix:
        config, form = self._config, self._form(name)
        if config.method != "gptq" or read is None:
            return round_to_nearest(weight, form, config.group)
        return gptq.quantize(weight, read.gram, form, config.group, config.damping, config.act_order, name)


def _mixture(layer: LoadedLayer) -> ExpertMlp:
    assert isinstance(layer.module.mlp, ExpertMlp)
    return layer.module.mlp
