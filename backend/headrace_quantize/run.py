"""A run from the first shard to the report.

    embedding ─> layer 0 ─> ... ─> layer n - 1 ─> norm, output layer        (shards, in that order)

Owns the order and what a run that goes on does again: it passes the text through finished layers,
from the original folder and from its own shards, and quantizes from the first unfinished one on.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from typing import Any

import torch
from torch import Tensor

from headrace_quantize.calibration_text import CalibrationText, Pieces, read_pieces
from headrace_quantize.checks import Job, QuantizeRefused, plain_projections, projections
from headrace_quantize.compressed_tensors import quantization_config
from headrace_quantize.config import VERSION
from headrace_quantize.decoder_pass import DecoderPass, LoadedLayer
from headrace_quantize.evaluation import Quality, compare
from headrace_quantize.output_folder import OutputFolder
from headrace_quantize.progress import RunProgress
from headrace_quantize.quantize_layer import LayerQuantizer
from headrace_quantize.report import LayerReport, RunReport
from headrace_quantize.source_tensors import SourceTensors
from headrace_quantize.text_config import text_config

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORM = "model.norm.weight"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of the configuration, what the bytes do not depend on, or depend on by way of something else that
# is noted.
_UNNOTED = {"model_folder", "out_folder", "calibration", "evaluation", "device", "threads", "resume"}


class Run:
    """One run. Made, then `quantize`d once."""

    def __init__(self, job: Job, progress: RunProgress) -> None:
        """Reads the text and takes up the folder.

        Raises:
            QuantizeRefused: The text does not suffice, the device is not there, the folder is
                another command's.
        """
        self._job, self._progress, self._began_s = job, progress, time.monotonic()
        device = _device(job.config.device)
        threads = job.config.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        self._text = _text(job)
        dtype = torch.float32 if device.type == "cpu" else _DTYPES[job.model.config.torch_dtype]
        self._passes = DecoderPass(job.model, dtype, device, job.config.sequence_length, progress.on_batch)
        self._source = SourceTensors(job.model)
        self.num_layers = len(job.model.config.description.layers)
        fingerprint = _fingerprint(job, self._text, device, threads)
        self.out = OutputFolder(job.out, fingerprint, self.num_layers + 2)
        self._quantizer = LayerQuantizer(job, self._source, self._passes, progress.note)

    @property
    def held_out(self) -> Pieces:
        """The ids that quality is measured on."""
        return self._text.held_out

    @torch.no_grad()
    def quantize(self) -> RunReport:
        """Writes the folder.

        Raises:
            QuantizeRefused: See `LayerQuantizer.quantize`.
            InvalidModelFolder: A tensor can't be read, or is not finite.
        """
        with contextlib.closing(self._source):
            return self._quantized()

    def _quantized(self) -> RunReport:
        tied = self._job.model.config.description.head.tied
        self._copy(0, [_EMBEDDING])
        calibration = self._passes.embed(self._text.calibration, self._source)
        before = self._passes.embed(self._text.held_out, self._source)
        after = before.clone()
        self._progress.begin([self._num_batches(index) for index in range(self.num_layers)])
        layers = [self._layer(index, calibration, before, after) for index in range(self.num_layers)]
        self._copy(self.num_layers + 1, [_NORM] if tied else [_NORM, _HEAD])
        quality = self._quality(before, after, tied) if self._text.held_out else None
        report = self._report(layers, quality)
        quantization = quantization_config(self._job.config, self._job.kept + plain_projections(self._job.model))
        self.out.finish(self._job.model.path, text_config(self._job.model), quantization, report.as_json())
        return report

    def _layer(self, index: int, calibration: Tensor, before: Tensor, after: Tensor) -> LayerReport:
        """Quantizes a layer, or takes it up, and passes all text through it."""
        layer, began_s = self._passes.load(index), time.monotonic()
        self._passes.run(layer.module, before)
        errors, heads = self.out.finished(index + 1), None
        if errors is None:
            errors, heads = self._quantize_layer(index, layer, calibration)
            what = f"model.layers.{index} took {time.monotonic() - began_s:.1f} s"
        else:
            self._quantizer.fill(layer, self.out.read(index + 1))
            what = f"model.layers.{index} was finished"
        if index + 1 < self.num_layers:
            self._passes.run(layer.module, calibration, heads)
        self._passes.run(layer.module, after)
        self._progress.layer_done(what)
        return LayerReport(f"model.layers.{index}", errors, _relative(before, after) if len(before) else None)

    def _num_batches(self, index: int) -> int:
        """Batches that pass through a layer, or a part of it, until it is done."""
        calibration, held_out = (
            self._passes.num_batches(len(pieces)) for pieces in (self._text.calibration, self._text.held_out)
        )
        passes = 0 if self.out.finished(index + 1) is not None else self._quantizer.num_passes(index)
        is_last = index + 1 == self.num_layers
        return 2 * held_out + (passes + (not is_last)) * calibration

    def _quantize_layer(
        self, index: int, layer: LoadedLayer, calibration: Tensor
    ) -> tuple[dict[str, float], Tensor | None]:
        """Writes a layer's shard; its errors, and the text's attention where it is known."""
        result = self._quantizer.quantize(index, layer, calibration)
        self.out.write(index + 1, result.tensors, result.errors)
        return result.errors, result.heads

    def _copy(self, shard: int, names: list[str]) -> None:
        if self.out.finished(shard) is None:
            self.out.write(shard, {name: self._source.read(name) for name in names}, {})

    def _quality(self, before: Tensor, after: Tensor, tied: bool) -> Quality:
        norm, pieces = self._job.model.config.description.norm, self._text.held_out
        self._progress.begin_measuring(len(pieces))
        return compare(pieces, before, after, self._source, self._passes, tied, norm, self._progress.on_piece)

    def _report(self, layers: list[LayerReport], quality: Quality | None) -> RunReport:
        job = self._job
        shapes = projections(job.model)
        bytes_after, before = self.out.tensor_bytes, sum(record.num_bytes for record in job.model.tensors.values())
        written = self.out.bytes_of(job.quantized)
        weights = sum(shapes[name][0] * shapes[name][1] for name in job.quantized)
        return RunReport(
            scheme=describe(job),
            bytes_before=before,
            bytes_after=bytes_after,
            bits_per_weight=8 * written / weights,
            layers=tuple(layers),
            quality=quality,
            calibration_tokens=sum(map(len, self._text.calibration)),
            seconds=time.monotonic() - self._began_s,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peak_card_bytes=torch.cuda.max_memory_allocated() if self._passes.device.type == "cuda" else 0,
        )


def describe(job: Job) -> str:
    """The scheme in a few words."""
    config = job.config
    group = "a scale per output" if config.group is None else f"groups of {config.group}"
    kind = "fp8" if config.scheme == "fp8" else f"int{config.bits}"
    zeros = "symmetric" if config.symmetric else "with zero points"
    order = ", ordered by activations" if config.act_order else ""
    kept = f", {len(job.kept)} projections kept" if job.kept else ""
    return f"{config.method} {kind}, {group}, {zeros}{order}{kept}"


def _text(job: Job) -> CalibrationText:
    if not job.config.has_text:
        return CalibrationText([], [], "")
    assert job.model.tokenizer_path is not None
    return read_pieces(job.config, job.model.tokenizer_path)


def _device(name: str) -> torch.device:
    """Raises QuantizeRefused if it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise QuantizeRefused("--device is cuda, and torch finds no GPU; cpu works")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _fingerprint(job: Job, text: CalibrationText, device: torch.device, threads: int) -> dict[str, Any]:
    """Everything that the bytes depend on.

    Sums of several threads are added up in an order that their number decides.
    """
    options = job.config.model_dump(mode="json", exclude=_UNNOTED)
    facts = {"version": VERSION, "model": job.model.revision, "text": text.digest, "torch": torch.__version__}
    return options | facts | {"device": device.type, "threads": threads}


def _relative(before: Tensor, after: Tensor) -> float:
    """||after - before|| / ||before||, piece by piece."""
    sums = [0.0, 0.0]
    for one, other in zip(before, after, strict=True):
        sums[0] += float((other.float() - one.float()).square().sum())
        sums[1] += float(one.float().square().sum())
    return (sums[0] / sums[1]) ** 0.5 if sums[1] else 0.0
