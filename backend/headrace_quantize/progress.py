"""How far a run is, on stderr: a bar on a terminal, a line per layer and now and then elsewhere.

Owns what is counted: steps, each a batch of pieces that passes through a layer or a part of it, or
a layer that is written. Every layer takes as many, so that the time that is left can be said.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from headrace_progress.phase import duration
from headrace_progress.shown import ShownProgress

_QUANTIZING = "quantizing"
_MEASURING = "measuring"


class RunProgress:
    """Steps of a run while it is entered."""

    def __init__(self, num_layers: int) -> None:
        """Shows nothing yet."""
        self._num_layers, self.layers_done = num_layers, 0
        self._shown = ShownProgress()
        self._steps, self._total = 0, 0
        # Steps at which each layer ends.
        self._ends: list[int] = []

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def begin(self, batches: list[int]) -> None:
        """The run begins, with so many batches in each layer."""
        for count in batches:
            self._total += count + 1
            self._ends.append(self._total)
        self._shown.begin(_QUANTIZING, self._total, "steps")

    def on_batch(self) -> None:
        """A batch has passed through a layer or a part of it."""
        if self._steps < self._total - 1:
            self._steps += 1
            self._shown.update(_QUANTIZING, self._steps, f"layer {self.layers_done + 1} of {self._num_layers}")

    def layer_done(self, what: str) -> None:
        """One more layer is written, in this way."""
        self.layers_done += 1
        self._steps = self._ends[self.layers_done - 1]
        done = f"{self.layers_done} of {self._num_layers} layers"
        self._shown.update(_QUANTIZING, self._steps, done)
        left_s = self._shown.left_s(_QUANTIZING)
        self._shown.milestone(f"{done}: {what}" + (f", about {duration(left_s)} left" if left_s else ""))

    def begin_measuring(self, num_pieces: int) -> None:
        """All layers are written; both models are compared on so many pieces."""
        self._shown.begin(_MEASURING, num_pieces, "pieces")

    def on_piece(self) -> None:
        """Both models have been compared on one more piece."""
        self._shown.advance(_MEASURING)

    def note(self, line: str) -> None:
        """A line for the operator."""
        self._shown.note(line)
