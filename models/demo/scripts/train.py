"""Trains the demo model and its draft on packed rows, bounded in time.

Owns the loop, the optimizers (Muon for matrices, AdamW for embedding and norms), the schedule and
the losses. Rows come from `demo_shards`, the model from `demo_model`. The target learns the next
token (tokens it is meant to say weigh 1, the others a tenth); the draft learns the target's
distribution over the same rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.nn.functional as functional
from demo_model import PAD_ID, DemoModel, rotary_tables
from demo_shards import SPOKEN_BIT, shard_path
from numpy.typing import NDArray
from torch import Tensor

UNSPOKEN_WEIGHT = 0.1
# Source: Jordan et al., Muon (2024); quintic with a steep start
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
FRESH_SHARDS = 16  # so many are waited for before any is read again
BatchLoss = Callable[[Tensor], Tensor]
Shard = NDArray[numpy.uint16]


@dataclass(frozen=True)
class Schedule:
    """How long to train and how fast.

    Attributes:
        seconds: Wall-clock bound; the learning rate falls with time used, so it always reaches its
            end.
        max_steps: Bound on steps, whichever comes first.
        batch_rows: Rows of 1,024 tokens per step.
        long_every: Every so many steps, pairs of rows are joined to 2,048 tokens, from the first
            steps on: a change of length late in the run meets weights that never saw such
            positions, and the loss jumps. Zero for never.
    """

    seconds: float
    max_steps: int
    batch_rows: int
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    warmup_steps: int = 100
    decay_share: float = 0.45
    long_every: int = 4
    seed: int = 1


class Rows:
    """Batches from shard files.

    First every shard as soon as it is written, and an earlier one again wherever the next is still
    being written: the device never waits for the corpus processes. Then all shards again and again
    in random order.
    """

    def __init__(self, folder: Path, shards: int, seed: int) -> None:
        self.folder, self.shards = folder, shards
        self.generator = numpy.random.default_rng(seed)
        self.waited_s = 0.0
        self.repeated = 0

    def _load(self, index: int) -> Shard:
        path = shard_path(self.folder, index)
        started = time.monotonic()
        while not path.exists():
            if time.monotonic() - started > 120:
                raise TimeoutError(f"no {path.name} after 120 s: did a corpus process fail?")
            time.sleep(0.05)
        self.waited_s += time.monotonic() - started
        shard: Shard = numpy.load(path)
        return shard

    def _indices(self) -> Iterator[int]:
        index = 0
        while index < self.shards:
            if index < FRESH_SHARDS or shard_path(self.folder, index).exists():
                yield index
                index += 1
            else:
                self.repeated += 1
                yield int(self.generator.integers(index))
        while True:
            yield from self.generator.permutation(self.shards).tolist()

    def batches(self, batch_rows: int) -> Iterator[Tensor]:
        """Yields int64 [batch_rows, ROW_TOKENS + 1] without end."""
        kept: list[Shard] = []
        for index in self._indices():
            kept.append(self.generator.permutation(self._load(index)))
            while sum(map(len, kept)) >= batch_rows:
                joined = numpy.concatenate(kept)
                yield torch.from_numpy(joined[:batch_rows].astype(numpy.int64))
                kept = [joined[batch_rows:]]


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix; matrices of one shape are done in one batch.

    Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(self, matrices: Sequence[Tensor], rate: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": rate, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # we never re-evaluate a loss
        """Updates every matrix."""
        for group in self.param_groups:
            matrices: list[Tensor] = group["params"]
            gradient = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            state = self.state[matrices[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            state["momentum"].lerp_(gradient, 1 - group["momentum"])
            update = orthogonal(gradient.lerp(state["momentum"], group["momentum"]))
            scale = group["lr"] * max(1.0, matrices[0].shape[0] / matrices[0].shape[1]) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(matrices, list(update.to(matrices[0].dtype).unbind(0)), alpha=-scale)


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz in bf16: singular values of the [n, rows, columns] matrices go to about 1."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    restored: Tensor = x.mT if tall else x
    return restored


def optimizers(model: DemoModel, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, schedule.muon_rate), adam]


def rate_factor(schedule: Schedule, step: int, progress: float) -> float:
    """Warm-up, plateau, then a linear fall to zero over the last `decay_share` of the run."""
    warm = min(1.0, (step + 1) / schedule.warmup_steps)
    return warm * max(0.0, min(1.0, (1.0 - progress) / schedule.decay_share))


def split_batch(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Marked rows [rows, tokens + 1] as inputs, targets and loss weights.

    Each of these has the shape [rows, tokens].
    """
    ids = batch & (SPOKEN_BIT - 1)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    spoken = (batch[:, 1:] & SPOKEN_BIT) != 0
    weights = torch.where(spoken, 1.0, UNSPOKEN_WEIGHT) * (targets != PAD_ID)
    return inputs.contiguous(), targets.contiguous(), weights


def join_pairs(batch: Tensor) -> Tensor:
    """Joins neighbouring rows: [rows, tokens + 1] -> [rows / 2, 2 x tokens + 1].

    One token of each pair is lost.
    """
    first, second = batch[0::2], batch[1::2]
    return torch.cat((first[:, :-1], second), dim=1)


def _next_token(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    logits = functional.linear(hidden, embedding.to(hidden.dtype)).float()
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum() / weights.sum()


def _imitation(
    hidden: Tensor, embedding: Tensor, teacher_hidden: Tensor, teacher_embedding: Tensor, weights: Tensor
) -> Tensor:
    """Mean cross-entropy of the draft against the target's whole distribution."""
    logits = functional.linear(hidden, embedding.to(hidden.dtype)).float()
    teacher = functional.linear(teacher_hidden, teacher_embedding.to(teacher_hidden.dtype)).float()
    each = -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return (each * weights).sum() / weights.sum()


class Compiler:
    """torch.compile where it works, the plain function where it does not."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __call__(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Compiles the function for static shapes."""
        return torch.compile(function, dynamic=False) if self.enabled else function

    def layers(self, model: DemoModel) -> None:
        """Compiles every layer in place; the layers share one compilation."""
        if self.enabled:
            for block in model.model.blocks():
                block.compile(dynamic=False)


def target_loss(model: DemoModel, compiler: Compiler) -> BatchLoss:
    """The next-token loss of a batch."""
    cos, sin = rotary_tables(model.shape, next(model.parameters()).device)
    head = compiler(_next_token)

    def loss(batch: Tensor) -> Tensor:
        inputs, targets, weights = split_batch(batch)
        tokens = inputs.shape[1]
        hidden = model.hidden(inputs, cos[:tokens], sin[:tokens])
        return head(hidden, model.model.embed_tokens.weight, targets, weights)

    return loss


def draft_loss(draft: DemoModel, target: DemoModel, compiler: Compiler) -> BatchLoss:
    """The draft's loss against the target's distribution."""
    device = next(target.parameters()).device
    cos, sin = rotary_tables(target.shape, device)
    head = compiler(_imitation)

    def loss(batch: Tensor) -> Tensor:
        inputs, _, weights = split_batch(batch)
        tokens = inputs.shape[1]
        with torch.no_grad():
            teacher = target.hidden(inputs, cos[:tokens], sin[:tokens])
        hidden = draft.hidden(inputs, cos[:tokens], sin[:tokens])
        teacher_embedding = target.model.embed_tokens.weight.detach()
        return head(hidden, draft.model.embed_tokens.weight, teacher, teacher_embedding, weights)

    return loss


def train(model: DemoModel, loss_of: BatchLoss, rows: Rows, schedule: Schedule, label: str) -> dict[str, float]:
    """Runs the loop until time or steps are used up.

    Returns:
        Steps, tokens, seconds, last smoothed loss, seconds spent waiting for data and shards read
        early again.

    Raises:
        FloatingPointError: If the loss is not finite.
    """
    device = next(model.parameters()).device
    chosen = optimizers(model, schedule)
    base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in chosen]
    started, step, tokens, smoothed = time.monotonic(), 0, 0, math.nan
    for batch in rows.batches(schedule.batch_rows):
        progress = max((time.monotonic() - started) / schedule.seconds, step / schedule.max_steps)
        if progress >= 1.0:
            break
        _set_rates(chosen, base_rates, rate_factor(schedule, step, progress))
        batch = batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch
        value = _step(model, loss_of, join_pairs(batch) if _is_long(schedule, step) else batch, chosen)
        step, tokens = step + 1, tokens + batch.shape[0] * (batch.shape[1] - 1)
        # reading the loss also keeps the clock honest: it waits for the device
        if step <= 3 or step % 100 == 0:
            smoothed = _log(label, value, smoothed, step, tokens, started)
    return {
        "steps": step, "tokens": tokens, "seconds": time.monotonic() - started, "loss": smoothed,
        "waited_s": rows.waited_s, "repeated_shards": rows.repeated,
    }  # fmt: skip


def _is_long(schedule: Schedule, step: int) -> bool:
    return schedule.long_every > 0 and step % schedule.long_every == schedule.long_every - 1


def _set_rates(chosen: list[torch.optim.Optimizer], base: list[list[float]], factor: float) -> None:
    for optimizer, rates in zip(chosen, base, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor


def _step(model: DemoModel, loss_of: BatchLoss, batch: Tensor, chosen: list[torch.optim.Optimizer]) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        value = loss_of(batch)
    torch.autograd.backward(value)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    for optimizer in chosen:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return value.detach()


def _log(label: str, value: Tensor, smoothed: float, step: int, tokens: int, started: float) -> float:
    now = float(value)
    if not math.isfinite(now):
        raise FloatingPointError(f"{label}: loss {now} at step {step}")
    smoothed = now if math.isnan(smoothed) else 0.8 * smoothed + 0.2 * now
    seconds = time.monotonic() - started
    if step <= 3 or step % 500 == 0:
        rate = tokens / seconds / 1e6
        print(f"{label}: step {step} loss {now:.4f} ({smoothed:.4f}) {rate:.2f} Mtok/s {seconds:.0f} s", flush=True)
    return smoothed
