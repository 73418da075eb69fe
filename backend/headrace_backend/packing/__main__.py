"""Says as JSON whether a model's weights look packed as their folder or file says.

    python -m headrace_backend.packing FOLDER DEVICE

The weights are read as a worker would.

Owns the program's edge. `headrace doctor --weights` runs it, in a process of its own because torch
is imported here. Exit code 0: an answer was given, also where the weights are refused.
"""

from __future__ import annotations

import pathlib
import sys

import msgspec

from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import load_model
from headrace_backend.packing.faults import packing_faults
from headrace_backend.packing.findings import findings_of
from headrace_backend.weights.progress import Progress
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up.device import choose_device, choose_dtype
from headrace_model_folder import InvalidModelFolder, ModelFolder
from headrace_progress.shown import ShownProgress


class Answer(msgspec.Struct):
    """What was found."""

    # Layers whose numbers another tool made and that were looked at; FP8 has none.
    num_layers: int = 0
    # One line each; the layer is named.
    faults: list[str] = []
    # Why a server would not load these weights; "": it would.
    refused: str = ""


def examined(path: pathlib.Path, device_name: str, progress: Progress = lambda *_: None) -> Answer:
    """Loads the model and looks at its quantized layers.

    Args:
        path: Model folder, or GGUF file.
        device_name: Device to load it on, as the setting `device` names it.
        progress: Called with (phase, done, total, unit) while the weights are read.
    """
    try:
        folder = ModelFolder.open(path)
        model = _loaded(folder, device_name, progress)
    except (InvalidModelFolder, QuantizationRefused, StartRefused) as refused:
        return Answer(refused=str(refused))
    quantization = folder.config.quantization
    found = findings_of(model, quantization.layers if quantization else {})
    norms = {name: value for name, value in model.named_parameters() if name.endswith("norm.weight")}
    return Answer(len(found), packing_faults(found, norms))


def _loaded(folder: ModelFolder, device_name: str, progress: Progress) -> CausalLM:
    device, _ = choose_device(device_name)
    dtype = choose_dtype("auto", folder.config, device)
    build = ModelBuild(folder.config, dtype, device, records=folder.tensors)
    return load_model(build, folder, progress)


def main(arguments: list[str]) -> None:
    """One folder, one answer; how far it is goes to stderr."""
    path, device_name = arguments
    with ShownProgress() as shown:
        answer = examined(pathlib.Path(path), device_name, shown.report)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
