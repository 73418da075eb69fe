"""What is drawn with drafts has the distribution that it has without: a G-test of each option.

The answers are equal token by token (`test_cpu_verification`), of which this is a consequence. It
is tested all the same, on its own terms: against probabilities that are computed from logits, over
a small vocabulary, with the drafts of each kind of drafter: looked up in what the row has, or drawn
with the target's noise from logits of a small model, of a head that knows some tokens only or of
the layer behind the target's last one. `-s` prints the p values.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.eagle_heads import head_config, maps, random_head, write_head
from tests.support.mtp_models import write_mtp_model
from tests.worker.speculation.test_mtp_drafts import pair_of

from headrace_backend.layers.sharded_module import weight_targets
from headrace_backend.models.eagle_head import EagleHead
from headrace_backend.weights.loader import load_weights
from headrace_backend.weights.placement import Placement
from headrace_kernels.sampling import parameters as columns
from headrace_kernels.sampling.choice import sample_rows
from headrace_kernels.sampling.penalties import penalize_rows_reference
from headrace_kernels.sampling.token_masks import mask_rows_reference
from headrace_kernels.speculation.acceptance import Drawn, RowState, accept_drafts
from headrace_kernels.speculation.ngram import propose_ngram
from headrace_model_folder import Eagle3Folder

VOCAB, DRAWS, LEAST_P = 8, 1_000_000, 0.001
# Rows of a batch, each with a seed of its own.
BATCH = 50_000
OPTIONS: dict[str, dict[str, float]] = {
    "none": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "penalty": {"temperature": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "bias": {"temperature": 1.0, "bias": 1.5},
    "grammar": {"temperature": 1.0, "grammar": 1.0},
}
# What the grammar lets follow each token, a bit for each token that may.
FOLLOWING = torch.tensor([0b01110110, 0b10011001, 0b11110000, 0b00001111, 0b10101010, 0b11111111, 0b1, 0b01100110])
DRAFTERS = ("ngram", "draft", "eagle", "mtp")


def survival(statistic: float, degrees: int) -> float:
    """Probability that a chi-squared variable exceeds the statistic."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def changed(logits: torch.Tensor, option: dict[str, float], drafts: torch.Tensor) -> torch.Tensor:
    """Logits [n, VOCAB] behind drafts [n, depth], as the sampler changes them."""
    logits = logits.clone()
    logits[:, 2] += option.get("bias", 0.0)
    if "grammar" in option:
        # Behind token 0, or behind the draft.
        before = drafts[:, -1].clamp(min=0)
        mask_rows_reference(logits, torch.arange(len(logits)), FOLLOWING[before].to(torch.int32)[:, None])
    if "frequency_penalty" in option:
        matrix = torch.zeros(1, columns.NUM_COLUMNS)
        matrix[0, columns.REPETITION], matrix[0, columns.FREQUENCY] = 1.3, option["frequency_penalty"]
        rows = torch.arange(len(logits))
        empty = torch.zeros(1, VOCAB, dtype=torch.bool), torch.zeros(1, VOCAB, dtype=torch.int32)
        none = torch.zeros(len(logits), dtype=torch.int64)
        penalize_rows_reference(logits, rows, none, none, *empty, matrix.view(torch.int32), drafts)
    return logits


def probabilities(logits: torch.Tensor, option: dict[str, float]) -> torch.Tensor:
    """What one draw from one row's logits should give, float64 [VOCAB]."""
    scaled = logits.double() / option["temperature"]
    order = scaled.argsort(descending=True)
    kept = torch.ones(VOCAB, dtype=torch.bool)
    if "top_k" in option:
        kept[order[int(option["top_k"]) :]] = False
    found = scaled.softmax(0)
    if "min_p" in option:
        kept &= found >= option["min_p"] * found.max()
    if "top_p" in option:
        before = found[order].cumsum(0) - found[order]
        kept[order[before >= option["top_p"]]] = False
    return scaled.masked_fill(~kept, -math.inf).softmax(0)


def parameter_rows(option: dict[str, float], first_seed: int) -> torch.Tensor:
    matrix = np.zeros((BATCH, columns.NUM_COLUMNS), np.int32)
    floats = matrix.view(np.float32)
    floats[:, columns.TOP_P] = option.get("top_p", 1.0)
    floats[:, columns.MIN_P] = option.get("min_p", 0.0)
    floats[:, columns.TEMPERATURE] = option["temperature"]
    matrix[:, columns.TOP_K] = int(option.get("top_k", 0))
    matrix[:, columns.SEED_LOW] = np.arange(first_seed, first_seed + BATCH)
    return torch.from_numpy(matrix)


# What a drafter proposes behind token 0 for each row: takes the parameters of the rows, and returns
# int64 [BATCH].
Propose = Callable[[torch.Tensor], torch.Tensor]


def looked_up(generator: torch.Generator) -> Propose:
    """Looks up token 0 and the one before it in lines of random tokens."""
    rows, lengths = torch.arange(BATCH, dtype=torch.int32), torch.full((BATCH,), 24)

    def propose(parameters: torch.Tensor) -> torch.Tensor:
        history = torch.randint(0, VOCAB, (BATCH, 24), generator=generator, dtype=torch.int32)
        history[:, -1] = 0
        return propose_ngram(history, rows, lengths, 1)[:, 0].long()

    return propose


def drawn_from(logits: torch.Tensor) -> Propose:
    """Draws with the target's own parameters and noise, as draft models do.

    Args:
        logits: [VOCAB] behind token 0.
    """
    rows = torch.arange(BATCH, dtype=torch.int32)

    def propose(parameters: torch.Tensor) -> torch.Tensor:
        return sample_rows(logits.repeat(BATCH, 1), rows, torch.zeros_like(rows), parameters)[0]

    return propose


def head_logits(path: pathlib.Path, known: torch.Tensor) -> torch.Tensor:
    """What an EAGLE-3 head that knows some tokens only says behind token 0: [VOCAB]."""
    target = {
        **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64},
    }
    config = head_config(target, len(known), (0, 1, 1))
    tensors = random_head(config) | maps(known, VOCAB)
    folder = Eagle3Folder.open(write_head(path / "head", config, tensors))
    head = EagleHead(folder, Placement(torch.float32, torch.device("cpu")), 64)
    with torch.inference_mode():
        load_weights(folder, weight_targets(head), lambda *_: None, "head")
        # Small enough that several tokens are likely.
        logits = head.logits(0.1 * torch.randn(1, 16, generator=torch.Generator().manual_seed(3)))[0]
    assert int(logits.isinf().sum()) == VOCAB - len(known)
    return logits.clone()


def layer_logits(path: pathlib.Path) -> torch.Tensor:
    """What the layer behind a model's last one says of a hidden state: [VOCAB]."""
    _, head = pair_of(write_mtp_model(path / "glm", vocab_size=VOCAB))
    with torch.inference_mode():
        # Small enough that several tokens are likely.
        return head.logits(0.3 * torch.randn(1, head.hidden_size, generator=torch.Generator().manual_seed(3)))[0]


@pytest.mark.slow  # test_cpu_verification.py has equal answers for each option.
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_settled_tokens_have_the_targets_distribution(drafter: str, option: str, tmp_path: pathlib.Path) -> None:
    """A model whose logits are a function of the token before; pairs of tokens are counted.

    The first token follows token 0, the draft is the drafter's, and the second token is the one
    that is drawn behind the draft where it was right, or by a step of its own where it was not.
    """
    asked = OPTIONS[option]
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    if drafter == "ngram":
        propose = looked_up(generator)
    elif drafter == "draft":
        propose = drawn_from(table[0] + torch.randn(VOCAB, generator=generator))
    elif drafter == "mtp":
        propose = drawn_from(layer_logits(tmp_path))
    else:
        propose = drawn_from(head_logits(tmp_path, table[0].topk(5).indices.sort().values))
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    num_accepted = 0
    for batch in range(DRAWS // BATCH):
        # With the same seeds all drafters would have the same answers, and the cells one p value.
        parameters = parameter_rows(asked, DRAWS * DRAFTERS.index(drafter) + batch * BATCH)
        rows = torch.arange(BATCH, dtype=torch.int32)
        drafts = propose(parameters)
        none = torch.full((BATCH, 1), -1)
        # Two draws a row: behind token 0, and behind the draft.
        logits = torch.stack(
            (changed(table[:1].repeat(BATCH, 1), asked, none), changed(table[drafts], asked, drafts[:, None])), dim=1
        ).flatten(0, 1)
        twice, places = rows.repeat_interleave(2), torch.tensor([0, 1], dtype=torch.int32).repeat(BATCH)
        tokens, finite = sample_rows(logits, twice, places, parameters)
        inputs = torch.stack((torch.zeros_like(drafts), drafts), dim=1).flatten()
        drawn = Drawn(tokens, finite, torch.arange(2 * BATCH, dtype=torch.int32), twice, places, inputs, places.long())
        state = RowState(*torch.zeros(2, BATCH, dtype=torch.int32))
        accepted = accept_drafts(drawn, 2 * rows, torch.full_like(rows, 2), state, 2, can_stay=True)
        first, second = accepted.tokens.unbind(1)
        missing = (accepted.counts == 1).nonzero()[:, 0]
        num_accepted += BATCH - len(missing)
        again = changed(table[first[missing]], asked, first[missing][:, None])
        second[missing], _ = sample_rows(again, rows[missing], torch.ones_like(rows[missing]), parameters)
        counts += torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
    assert 0 < num_accepted < DRAWS
    none = torch.full((1, 1), -1)
    head = probabilities(changed(table[:1], asked, none)[0], asked)
    tails = [
        probabilities(changed(table[token][None], asked, torch.tensor([[token]]))[0], asked) for token in range(VOCAB)
    ]
    expected = head[:, None] * torch.stack(tails) * DRAWS
    assert not counts[expected == 0].any(), "a token was drawn that is left out"
    seen = expected > 0
    ratio = counts[seen].double() / expected[seen]
    statistic = 2 * float(torch.xlogy(counts[seen].double(), ratio).sum())
    probability = survival(statistic, int(seen.sum()) - 1)
    print(f"{drafter} {option}: {num_accepted / DRAWS:.0%} of drafts settled, G-test p = {probability:.3f}")
    assert probability >= LEAST_P / (len(OPTIONS) * len(DRAFTERS))
