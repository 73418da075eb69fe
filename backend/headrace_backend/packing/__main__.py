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
from headrace_backend.weights.scheme import QuantizationRefused
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up.device import choose_device, choose_dtype
from headrace_model_folder import InvalidModelFolder, ModelFolder


class Answer(msgspec.Struct):
    """What was found."""

    # Layers whose numbers another tool made and that were looked at; FP8 has none.
    num_layers: int = 0
    # One line each; the layer is named.
    faults: list[str] = []
    # Why a server would not load these weights; "": it would.
    refused: str = ""


def examined(path: pathlib.Path, device_name: str) -> Answer:
    """Loads the model and looks at its quantized layers.

    Args:
        path: Model folder, or GGUF file.
        device_name: Device to load it on, as the setting `device` names it.
    """
    try:
        folder = ModelFolder.open(path)
        model = _loaded(folder, device_name)
    except (InvalidModelFolder, QuantizationRefused, StartRefused) as refused:
        return Answer(refused=str(refused))
    quantization = folder.config.quantization
    found = findings_of(model, quantization.layers if quantization else {})
    norms = {name: value for name, value in model.named_parameters() if name.endswith("norm.weight")}
    return Answer(len(found), packing_faults(found, norms))


def _loaded(folder: ModelFolder, device_name: str) -> CausalLM:
    device, _ = choose_device(device_name)
    dtype = choose_dtype("auto", folder.config, device)
    build = ModelBuild(folder.config, dtype, device, records=folder.tensors)
    return load_model(build, folder, lambda *_: None)


def main(arguments: list[str]) -> None:
    """One folder, one answer."""
    path, device_name = arguments
    sys.stdout.buffer.write(msgspec.json.encode(examined(pathlib.Path(path), device_name)))


if __name__ == "__main__":
    main(sys.argv[1:])
