"""What the workers of one life are together, from what each said when it was ready.

Owns the sums: rates of all ranks, how the layers of all pipeline stages were quantized, and the
seconds of each rank's start. Ranks of one stage have parts of the same layers and report alike, so
the first of each stage speaks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headrace_backend.step.messages import QuantizationReport, WorkerReady


def together(ready: Sequence[WorkerReady], stage_size: int) -> WorkerReady:
    """Returns rank 0's message with what holds for all.

    Args:
        ready: The ranks' messages, stage after stage.
        stage_size: Ranks of each pipeline stage.
    """
    reports = [message.quantization for message in ready[::stage_size] if message.quantization is not None]
    return msgspec.structs.replace(
        ready[0],
        num_blocks=min(message.num_blocks for message in ready),
        num_checkpoints=min(message.num_checkpoints for message in ready),
        copy_bytes_per_s=sum(message.copy_bytes_per_s for message in ready),
        matmul_flops_per_s=sum(message.matmul_flops_per_s for message in ready),
        marks_per_step=min(message.marks_per_step for message in ready),
        quantization=_of_all_stages(reports) if reports else None,
    )


def phases_by_rank(ready: Sequence[WorkerReady]) -> dict[str, list[float]]:
    """Returns for each phase of a start the seconds that it took each rank, to the millisecond.

    Ranks wait for each other at the end of a phase, so the one that took longest made it so long. A
    phase that a rank did not have is 0 there.
    """
    names = dict.fromkeys(name for message in ready for name in message.phases_s)
    return {name: [round(message.phases_s.get(name, 0.0), 3) for message in ready] for name in names}


def _of_all_stages(reports: Sequence[QuantizationReport]) -> QuantizationReport:
    """One report of all layers; the output layer is that of the stage that has it."""
    last = reports[-1]
    layers = [report for report in reports if report.scheme]
    if len(reports) == 1 or not layers:
        return last
    num_tensors = sum(report.num_tensors for report in layers)
    worst = max(layers, key=lambda report: report.worst_relative_error)
    groups = {report.group_size for report in layers}

    def mean(values: Iterable[float]) -> float:
        return sum(value * report.num_tensors for value, report in zip(values, layers, strict=True)) / num_tensors

    return msgspec.structs.replace(
        last,
        # What is stored in several kinds of blocks names those of each stage.
        scheme="+".join(dict.fromkeys(kind for report in layers for kind in report.scheme.split("+"))),
        group_size=groups.pop() if len(groups) == 1 else 0,
        bits_per_weight=mean(report.bits_per_weight for report in layers),
        mean_relative_error=mean(report.mean_relative_error for report in layers),
        worst_relative_error=worst.worst_relative_error,
        worst_tensor=worst.worst_tensor,
        num_tensors=num_tensors,
        activations=layers[0].activations,
    )
