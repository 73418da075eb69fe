"""What quantizing cost: both models on text that was not calibrated on.

Owns the sums over tokens. Layers have passed the text already; here are the last norm and the
output layer, both as the original has them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from headrace_model_folder.description import Norm
from headrace_quantize.calibration_text import Pieces
from headrace_quantize.decoder_pass import DecoderPass
from headrace_quantize.source_tensors import SourceTensors

# Tokens whose distributions over the vocabulary are in memory at once.
_TOKENS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """Quality of the quantized model beside the original, over the tokens of the held-out text.

    The first token of each piece does not count.
    """

    tokens: int
    perplexity_before: float
    perplexity_after: float
    # Mean KL divergence from the original's distribution to the quantized model's, in nats.
    divergence: float
    # Share of tokens at which both find the same one most likely.
    same_choice: float
    # How much more a token surprises the quantized model, in nats: the logarithm of the
    # perplexities' ratio. It may be below 0: noise that takes certainty from a model that is too
    # certain of a text makes its perplexity fall.
    surprise_change: float
    # Half of the 95% interval of that and of the divergence, over pieces, whose tokens go together;
    # None of one piece.
    surprise_change_interval: float | None
    divergence_interval: float | None


def compare(
    pieces: Pieces,
    before: Tensor,
    after: Tensor,
    source: SourceTensors,
    passes: DecoderPass,
    tied: bool,
    last_norm: Norm,
    on_piece: Callable[[], None] = lambda: None,
) -> Quality:
    """Compares the quantized model with the original.

    Args:
        pieces: The ids, as many in each.
        before: Hidden states [pieces, tokens, width] after all of the original's layers.
        after: Hidden states [pieces, tokens, width] after all of the quantized layers.
        source: Tensors of the original, for norm and output layer.
        passes: Decoder passes of the type and device to compute with.
        tied: Whether the embedding is the output layer.
        last_norm: The norm behind the last layer.
        on_piece: Called after each piece.
    """
    norm = passes.norm(last_norm, source)
    head = source.read("model.embed_tokens.weight" if tied else "lm_head.weight").to(passes.device, passes.dtype)
    # Of each piece.
    means = torch.zeros(len(pieces), 4, dtype=torch.float64)
    for index, ids in enumerate(pieces):
        targets = torch.tensor(ids[1:], device=passes.device)
        for first in range(0, len(targets), _TOKENS):
            part = slice(first, min(first + _TOKENS, len(targets)))
            wanted, found = (
                (norm(hidden[index, part].to(passes.device)) @ head.t()).float().log_softmax(-1)
                for hidden in (before, after)
            )
            means[index] += _sums(wanted, found, targets[part]) / len(targets)
        on_piece()
    surprise_before, surprise_after, divergence, same = means.mean(0).tolist()
    changes = means[:, 1] - means[:, 0]
    return Quality(
        sum(len(ids) - 1 for ids in pieces),
        math.exp(surprise_before),
        math.exp(surprise_after),
        divergence,
        same,
        float(changes.mean()),
        _interval(changes),
        _interval(means[:, 2]),
    )


def _interval(values: Tensor) -> float | None:
    """Half of the 95% interval of a mean."""
    return 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None


def _sums(wanted: Tensor, found: Tensor, targets: Tensor) -> Tensor:
    """Sums surprise of both models, divergence and equal choices over some tokens.

    They are [4] fp64 on the host; logarithms of probabilities are [tokens, vocabulary].
    """
    surprises = [-side.gather(1, targets[:, None]).sum() for side in (wanted, found)]
    divergence = (wanted.exp() * (wanted - found)).sum()
    same = (wanted.argmax(-1) == found.argmax(-1)).sum()
    return torch.stack([*surprises, divergence, same.float()]).double().cpu()
