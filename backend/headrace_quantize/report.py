"""What a run came to: as JSON in the folder, as a table on the terminal.

Owns the fields and the words.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import rich.box
import rich.console
import rich.table

from headrace_quantize.evaluation import Quality


@dataclasses.dataclass(frozen=True, slots=True)
class LayerReport:
    """One decoder layer."""

    layer: str
    # Projection -> relative error of its outputs on the calibration text; without text, of its
    # weights.
    errors: dict[str, float]
    # Relative error of what leaves the layer on the held-out text, all layers before it included;
    # None without text.
    hidden_error: float | None

    @property
    def worst(self) -> tuple[str, float]:
        """The projection with the largest error; ("", 0) where all were kept."""
        name = max(self.errors, key=self.errors.__getitem__, default="")
        return name.removeprefix(f"{self.layer}."), self.errors.get(name, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run."""

    scheme: str
    bytes_before: int
    bytes_after: int
    # Of the quantized layers alone, scales and zero points included.
    bits_per_weight: float
    layers: tuple[LayerReport, ...]
    # None without text.
    quality: Quality | None
    calibration_tokens: int
    seconds: float
    # The most that the process had in memory; on a card what torch had of it.
    peak_memory_bytes: int
    peak_card_bytes: int

    def as_json(self) -> dict[str, Any]:
        """All fields, and each layer's worst projection."""
        values = dataclasses.asdict(self)
        for entry, layer in zip(values["layers"], self.layers, strict=True):
            entry["worst"] = dict(zip(("projection", "error"), layer.worst, strict=True))
        return values


def print_report(report: RunReport) -> None:
    """Writes the tables to stdout."""
    console = rich.console.Console(highlight=False)
    console.print(report.scheme, soft_wrap=True, markup=False)
    console.print(_summary(report))
    console.print(_layers(report))


def _summary(report: RunReport) -> rich.table.Table:
    table = rich.table.Table("", "before", "after", box=rich.box.SIMPLE)
    before, after = report.bytes_before, report.bytes_after
    table.add_row("weights, MiB", f"{before / 2**20:,.1f}", f"{after / 2**20:,.1f} ({after / before:.1%})")
    table.add_row("bits per quantized weight", "", f"{report.bits_per_weight:.2f}")
    if (quality := report.quality) is not None:
        table.add_row("perplexity", f"{quality.perplexity_before:.4f}", f"{quality.perplexity_after:.4f}")
        table.add_row(
            "surprise, nats", "", f"{quality.surprise_change:+.5f}{_plus_minus(quality.surprise_change_interval)}"
        )
        table.add_row("divergence, nats", "", f"{quality.divergence:.5f}{_plus_minus(quality.divergence_interval)}")
        table.add_row("same choice", "", f"{quality.same_choice:.2%}")
        table.add_row("held-out tokens", "", f"{quality.tokens:,}")
    table.add_row("calibration tokens", "", f"{report.calibration_tokens:,}")
    table.add_row("peak memory, MiB", "", f"{report.peak_memory_bytes / 2**20:,.0f}")
    if report.peak_card_bytes:
        table.add_row("peak memory of the card, MiB", "", f"{report.peak_card_bytes / 2**20:,.0f}")
    table.add_row("seconds", "", f"{report.seconds:,.1f}")
    return table


def _plus_minus(interval: float | None) -> str:
    return "" if interval is None else f" ± {interval:.5f}"


def _layers(report: RunReport) -> rich.table.Table:
    of_what = "output error" if report.calibration_tokens else "weight error"
    table = rich.table.Table("layer", "worst projection", of_what, "hidden states off by", box=rich.box.SIMPLE)
    for layer in report.layers:
        name, error = layer.worst
        hidden = "" if layer.hidden_error is None else f"{layer.hidden_error:.2%}"
        table.add_row(layer.layer, name or "all kept", f"{error:.2%}", hidden)
    return table
