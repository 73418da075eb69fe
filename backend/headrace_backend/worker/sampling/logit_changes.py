"""Changes to single logits: logit bias, stop tokens banned by min_tokens, completions of bad words.

Owns them for the rows that have some. All changes of a step are additions at (sample, token), -inf
for a ban, so that they are one scatter whatever their number. A bad word compares with the row's
latest tokens on the device, because the engine and this process may not have read those yet.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace_backend.step.plan import Float32Column, Int32Column, RowAdmission
from headrace_backend.worker.device_copies import copy_to_device, indices_on_device
from headrace_backend.worker.sampling.drafted_draws import DraftedDraws

# Stands in a bad word's prefix where the word is shorter than the longest: equals anything.
_ANY = -1
# Stands in the latest tokens where the output is still shorter: equals nothing.
_NONE = -2
# A change holds for outputs of any length.
_ALWAYS = np.iinfo(np.int32).max


class BadWords:
    """The bad words of one row and the row's latest output tokens.

    A word counts when all of it is generated; the prompt may contain any part of it.
    """

    def __init__(self, words: list[Int32Column], output_ids: Int32Column, device: torch.device) -> None:
        length = max(word.size for word in words) - 1
        prefixes = np.full((len(words), length), _ANY, np.int64)
        for prefix, word in zip(prefixes, words, strict=True):
            prefix[length - (word.size - 1) :] = word[:-1]
        latest = np.full(length, _NONE, np.int64)
        known = output_ids[max(0, output_ids.size - length) :]
        latest[length - known.size :] = known
        self._prefixes = copy_to_device(prefixes, device)
        self._wildcards = self._prefixes == _ANY
        self._latest = copy_to_device(latest, device)
        self._last_tokens = indices_on_device(np.array([word[-1] for word in words]), device)

    def ban(self, logits: torch.Tensor) -> None:
        """Bans, in one row's logits float32 [vocab_size], each token that would complete a word."""
        completes = ((self._prefixes == self._latest) | self._wildcards).all(dim=1)
        bans = torch.zeros_like(completes, dtype=logits.dtype).masked_fill_(completes, -torch.inf)
        logits.index_add_(0, self._last_tokens, bans)

    def append(self, token: torch.Tensor) -> None:
        """Notes the token just drawn, int64 [1]."""
        if self._latest.numel():
            self._latest = torch.cat((self._latest[1:], token))

    def ban_each(self, logits: torch.Tensor, drafts: torch.Tensor) -> None:
        """Bans the same behind drafts, each draw with the drafts before it as output.

        Args:
            logits: float32 [num_draws, vocab_size] of one row, changed in place.
            drafts: int64 [num_draws - 1].
        """
        length = self._latest.numel()
        seen = torch.cat((self._latest, drafts))
        latest = seen.unfold(0, length, 1) if length else seen.new_empty(logits.shape[0], 0)
        completes = ((self._prefixes == latest[:, None]) | self._wildcards).all(dim=2)
        bans = torch.zeros_like(completes, dtype=logits.dtype).masked_fill_(completes, -torch.inf)
        logits.index_add_(1, self._last_tokens, bans)

    def append_settled(self, tokens: torch.Tensor, count: torch.Tensor) -> None:
        """Notes the first `count` of the tokens just drawn, int64 [num_draws]; the count is [1]."""
        length = self._latest.numel()
        if length:
            places = torch.arange(length, device=tokens.device) + count
            self._latest = torch.cat((self._latest, tokens))[places]


@dataclasses.dataclass(slots=True)
class _RowChanges:
    bias_ids: Int32Column
    bias_values: Float32Column
    min_tokens: int
    stop_token_ids: Int32Column
    bad_words: BadWords | None


class LogitChanges:
    """The changes of all rows that have some."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, _RowChanges] = {}

    def admit(self, admission: RowAdmission) -> None:
        """Takes a row's bias, stop tokens and bad words."""
        sampling = admission.sampling
        words = [np.frombuffer(word, np.int32) for word in sampling.bad_words]
        history = np.frombuffer(admission.output_ids, np.int32)
        self._rows[admission.row] = _RowChanges(
            bias_ids=np.frombuffer(sampling.logit_bias_ids, np.int32),
            bias_values=np.frombuffer(sampling.logit_bias_values, np.float32),
            min_tokens=admission.min_tokens,
            stop_token_ids=np.frombuffer(admission.stop_token_ids, np.int32),
            bad_words=BadWords(words, history, self._device) if words else None,
        )

    def release(self, row: int) -> None:
        """Forgets a row."""
        self._rows.pop(row, None)

    def apply(
        self,
        logits: torch.Tensor,
        samples: list[int],
        rows: list[int],
        positions: list[int],
        exact_positions: torch.Tensor | None = None,
    ) -> None:
        """Adds biases and bans tokens that end an output too early, in place.

        Args:
            logits: float32 [num_samples, vocab_size] of the whole batch.
            samples: Which of them have changes.
            rows: The row of each of those.
            positions: The position in its output of the token that each of those draws.
            exact_positions: int32 [num_samples] on the device, where `positions` are upper bounds.
        """
        places: list[Int32Column] = []
        values: list[Float32Column] = []
        counts: list[int] = []
        # Lengths of outputs below which each change holds.
        ends: list[Int32Column] = []
        for row, position in zip(rows, positions, strict=True):
            changes = self._rows[row]
            is_banned = position < changes.min_tokens or (exact_positions is not None and changes.min_tokens > 0)
            banned = changes.stop_token_ids if is_banned else changes.stop_token_ids[:0]
            places += (changes.bias_ids, banned)
            values += (changes.bias_values, np.full(banned.size, -np.inf, np.float32))
            counts.append(changes.bias_ids.size + banned.size)
            if exact_positions is not None:
                ends += (np.full(changes.bias_ids.size, _ALWAYS, np.int32), np.full_like(banned, changes.min_tokens))
        if not any(counts):
            return
        indices = indices_on_device(np.stack((np.repeat(samples, counts), np.concatenate(places))), self._device)
        additions = copy_to_device(np.concatenate(values), self._device)
        if exact_positions is not None:
            holds = exact_positions[indices[0]] < copy_to_device(np.concatenate(ends), self._device)
            additions = torch.where(holds, additions, 0)
        logits.index_put_(tuple(indices), additions, accumulate=True)

    def ban_words(self, logits: torch.Tensor, samples: list[int], rows: list[int]) -> None:
        """Bans tokens that would complete a bad word, in place; arguments as those of `apply`."""
        for sample, row in zip(samples, rows, strict=True):
            if (bad_words := self._rows[row].bad_words) is not None:
                bad_words.ban(logits[sample])

    def append(self, samples: list[int], rows: list[int], tokens: torch.Tensor) -> None:
        """Notes the tokens just drawn, int64 [num_samples] of the whole batch."""
        for sample, row in zip(samples, rows, strict=True):
            if (bad_words := self._rows[row].bad_words) is not None:
                bad_words.append(tokens[sample : sample + 1])

    def ban_drafted_words(self, logits: torch.Tensor, rows: Int32Column, drafted: DraftedDraws) -> None:
        """Does what `ban_words` does, at each draw of rows with bad words behind its drafts.

        Args:
            logits: float32 [num_draws, vocab_size] of the whole batch, changed in place.
            rows: [num_draws] the row of each draw.
            drafted: The draws.
        """
        found = self._with_bad_words(rows, drafted)
        inputs = drafted.inputs if found else None
        for _, first, end, bad_words in found:
            assert inputs is not None, "looked up where there are bad words"
            bad_words.ban_each(logits[first:end], inputs[first + 1 : end])

    def append_settled(
        self, rows: Int32Column, drafted: DraftedDraws, tokens: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Notes the tokens that were settled.

        Args:
            rows: [num_draws] the row of each draw.
            drafted: The draws.
            tokens: int64 [num_draws], drawn.
            counts: int32 [num_samples] how many tokens each sample settled.
        """
        for sample, first, end, bad_words in self._with_bad_words(rows, drafted):
            bad_words.append_settled(tokens[first:end], counts[sample : sample + 1])

    def _with_bad_words(self, rows: Int32Column, drafted: DraftedDraws) -> list[tuple[int, int, int, BadWords]]:
        """Samples of rows that have bad words: number, first draw, the end of its draws, words."""
        firsts, counts = drafted.firsts.tolist(), drafted.counts.tolist()
        samples = zip(rows[drafted.firsts].tolist(), firsts, counts, strict=True)
        found = ((self._rows.get(row), first, count) for row, first, count in samples)
        return [
            (sample, first, first + count, changes.bad_words)
            for sample, (changes, first, count) in enumerate(found)
            if changes is not None and changes.bad_words is not None
        ]
