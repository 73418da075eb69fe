"""Small models with text for them.

The demo's draft model, which is trained, and random ones of every family.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
from tests.models.checkpoints import VOCAB_SIZE, write_checkpoint

from headrace_model_folder import ModelFolder
from headrace_quantize.calibration_text import Pieces
from headrace_quantize.checks import Job, check, projections
from headrace_quantize.config import QuantizeConfig
from headrace_quantize.decoder_pass import DecoderPass
from headrace_quantize.progress import RunProgress
from headrace_quantize.quantize_layer import LayerQuantizer
from headrace_quantize.report import RunReport
from headrace_quantize.run import Run
from headrace_quantize.source_tensors import SourceTensors

ROOT = pathlib.Path(__file__).resolve().parents[2]
DRAFT = ROOT / "models" / "demo" / "draft"
LENGTH = 64
sys.path.insert(0, str(ROOT / "models" / "demo" / "scripts"))

from corpus import render, training_item  # noqa: E402
from corpus_draw import Draw  # noqa: E402


def demo_text(seed: int, documents: int) -> str:
    """Text that the demo models were trained on the like of."""
    draw = Draw(seed, "train")
    return "\n\n".join(render(training_item(draw).turns) for _ in range(documents))


def write_text(folder: pathlib.Path, documents: int = 60, name: str = "text.txt", seed: int = 1) -> pathlib.Path:
    path = folder / name
    path.write_text(demo_text(seed, documents), encoding="utf-8")
    return path


def request(model: pathlib.Path, out: pathlib.Path, **options: Any) -> QuantizeConfig:
    given = {"device": "cpu", "threads": 1, "group_size": 32, **options}
    if options.get("calibration"):
        given = {"samples": 16, **given}
    if options.get("calibration") or options.get("evaluation"):
        given = {"sequence_length": LENGTH, **given}
    return QuantizeConfig(model_folder=str(model), out_folder=str(out), **given)


def quantize(config: QuantizeConfig) -> RunReport:
    job = check(config)
    return Run(job, RunProgress(len(job.model.config.description.layers))).quantize()


class Bench:
    """A random model of one family, and what quantizes its layers."""

    def __init__(self, folder: pathlib.Path, family: str, **options: Any) -> None:
        self.theirs = write_checkpoint(folder / "model", family)
        config = request(folder / "model", folder / "out", calibration=("text",), **options)
        model = ModelFolder.open(folder / "model")
        self.job = Job(config, model, folder / "out", tuple(projections(model)), ())
        self.source = SourceTensors(model)
        self.passes = DecoderPass(model, torch.float32, torch.device("cpu"), LENGTH)
        self.quantizer = LayerQuantizer(self.job, self.source, self.passes, lambda _: None)
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(0, VOCAB_SIZE, (12, LENGTH), generator=generator)
        self.pieces: Pieces = ids.tolist()
