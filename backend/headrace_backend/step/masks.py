"""The late column of a step: which tokens rows with a grammar may draw.

The forward pass of a step needs the tokens before it, but a mask needs the last of them read. So
masks cross behind the plan, in a record of their own on the same ring, while the device computes
the pass: a worker waits for them between forward and draw. A plan says whether they come
(`StepPlan.num_masked`); one record brings all of a step.

Owns the columns and their byte form. Does not own what the masks mean (`headrace_kernels.sampling.
token_masks`) nor who computes them (the backend's `structured_output`).
"""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import numpy.typing as npt

from headrace_backend.step.plan import Int32Column, StepPlan

# Step id, masks, words of a mask.
_HEADER = struct.Struct("<QII")
_INT = 4
_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits of one row's mask."""
    return -(-vocab_size // _BITS)


def max_masks_bytes(num_draws: int, vocab_size: int) -> int:
    """Bytes of the largest record: each of `num_draws` draws has a mask."""
    return _HEADER.size + _INT * num_draws * (2 + mask_words(vocab_size))


def empty_record(num_masks: int, num_words: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Memory for a record, and the place of its masks in it, int32 [num_masks, num_words]."""
    size = _INT * num_masks * num_words
    record = np.empty(_HEADER.size + 2 * _INT * num_masks + size, np.uint8)
    return record, record[record.size - size :].view(np.int32).reshape(num_masks, num_words)


@dataclasses.dataclass(slots=True, eq=False)
class StepMasks:
    """Masks of the draws of one step that have some."""

    step_id: int
    # [num_masked] which samples of the plan, and which draw of each: 0 is its first, i the one
    # behind i drafts. A sample of a row with a grammar that is missing is drawn without a mask: its
    # output has ended, and the token is dropped. So is a draw behind a draft that can't be right.
    samples: Int32Column
    places: Int32Column
    # [num_masked, words] bit t % 32 of word t // 32 says whether token t may be drawn.
    masks: npt.NDArray[np.int32]
    # Where the masks were written into a record: all of it, the masks at its end.
    record: npt.NDArray[np.uint8] | None = None

    def encode(self) -> bytes | memoryview:
        """Encodes the masks as bytes: a header, then the columns.

        Masks of many rows are megabytes: those that lie in a record are not copied.
        """
        header = _HEADER.pack(self.step_id, *self.masks.shape)
        before = b"".join([header, self.samples.tobytes(), self.places.tobytes()])
        if self.record is None:
            return before + self.masks.tobytes()
        self.record[: len(before)] = np.frombuffer(before, np.uint8)
        return self.record.data

    def at(self, firsts: Int32Column) -> StepMasks:
        """Masks by draw, for a worker that drafts.

        Args:
            firsts: [num_samples] the first draw of each sample of the plan.

        Returns:
            Masks of a plan in which each draw is a sample of its own.
        """
        return dataclasses.replace(self, samples=firsts[self.samples] + self.places, places=np.zeros_like(self.places))

    def within(self, samples: slice) -> StepMasks:
        """Masks of a run of the plan's samples, by their places in it."""
        held = (self.samples >= samples.start) & (self.samples < samples.stop)
        return dataclasses.replace(
            self,
            samples=self.samples[held] - np.int32(samples.start),
            places=self.places[held],
            masks=self.masks[held],
            record=None,
        )

    @classmethod
    def decode(cls, data: bytes | memoryview) -> StepMasks:
        """Reads what `encode` wrote. The columns are views of `data`, which must outlive them."""
        step_id, num_masked, words = _HEADER.unpack_from(data)
        samples, places = np.frombuffer(data, np.int32, 2 * num_masked, _HEADER.size).reshape(2, num_masked)
        masks = np.frombuffer(data, np.int32, num_masked * words, _HEADER.size + 2 * _INT * num_masked)
        return cls(step_id, samples, places, masks.reshape(num_masked, words))


def open_masks(plan: StepPlan, vocab_size: int) -> StepMasks:
    """Masks that allow every token to the first draw of each sample of a plan."""
    num_samples = plan.sample.rows.size
    masks = np.full((num_samples, mask_words(vocab_size)), -1, np.int32)
    samples = np.arange(num_samples, dtype=np.int32)
    return StepMasks(plan.step_id, samples, np.zeros_like(samples), masks)


def no_masks(step_id: int, vocab_size: int) -> StepMasks:
    """Masks of a step in which nobody needs one any more."""
    nothing = np.empty(0, np.int32)
    return StepMasks(step_id, nothing, nothing, np.empty((0, mask_words(vocab_size)), np.int32))
