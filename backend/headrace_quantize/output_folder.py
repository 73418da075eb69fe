"""The folder that is written: shards that appear whole, a state of which are done, then the rest.

    layer n's tensors -> model-0000x-of-0000y.safetensors -> quantization-state.json (that shard's
    sum, what is reported of the layer) all shards -> index, tokenizer and templates, config.json ->
    quantization-report.json -> the state is removed

Every file is written beside its name, flushed to the disk and renamed, so that a process that is
killed leaves whole files and temporary ones, which the next run removes. Without config.json nobody
takes the folder for a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

from headrace_model_folder.config import CONFIG_FILE
from headrace_model_folder.measured_loss import REPORT_FILE
from headrace_quantize.checks import STATE_FILE, TEMPORARY, QuantizeRefused

INDEX_FILE = "model.safetensors.index.json"
# What a folder may have besides weights and configuration; what it has is copied.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class OutputFolder:
    """One run's folder."""

    def __init__(self, path: pathlib.Path, fingerprint: dict[str, Any], num_shards: int) -> None:
        """Takes up a folder, new or of a run that was killed.

        Args:
            path: The folder.
            fingerprint: Everything that the bytes depend on.
            num_shards: Number of shards that there will be.

        Raises:
            QuantizeRefused: The folder is of another command, or a finished shard has changed.
        """
        self.path, self._num_shards = path, num_shards
        path.mkdir(parents=True, exist_ok=True)
        for left in path.glob(f"*{TEMPORARY}"):
            left.unlink()
        self.is_finished = (path / REPORT_FILE).exists() and not (path / STATE_FILE).exists()
        file = path / (REPORT_FILE if self.is_finished else STATE_FILE)
        self._state: dict[str, Any] = {"fingerprint": fingerprint, "shards": {}}
        if file.exists():
            self._state = json.loads(file.read_text(encoding="utf-8"))
            self._check(fingerprint)
        else:
            self._write_json(STATE_FILE, self._state)

    def finished(self, index: int) -> Any:
        """What was noted with a finished shard; None if it is still to be written."""
        entry = self._state["shards"].get(self._name(index))
        return None if entry is None else entry["note"]

    def read(self, index: int) -> dict[str, Tensor]:
        """A finished shard's tensors.

        Raises:
            QuantizeRefused: Its bytes are not those that were written.
        """
        name = self._name(index)
        data = (self.path / name).read_bytes() if (self.path / name).exists() else b""
        if hashlib.sha256(data).hexdigest() != self._state["shards"][name]["sha256"]:
            raise QuantizeRefused(f"OUT_FOLDER: {name} is not what was written; remove the folder and begin anew")
        return safetensors.torch.load(data)

    def write(self, index: int, tensors: Mapping[str, Tensor], note: Any) -> None:
        """Writes a shard, then the state that says so.

        Args:
            index: From 0.
            tensors: On the host, contiguous.
            note: What is to be known of it when the run goes on; JSON.
        """
        data = safetensors.torch.save(dict(sorted(tensors.items())), metadata={"format": "pt"})
        self._write(self._name(index), data)
        self._state["shards"][self._name(index)] = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "tensors": {name: tensor.nbytes for name, tensor in sorted(tensors.items())},
            "note": note,
        }
        self._write_json(STATE_FILE, self._state)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors of all shards that were written."""
        return sum(sum(entry["tensors"].values()) for entry in self._state["shards"].values())

    def bytes_of(self, projections: Collection[str]) -> int:
        """Bytes of the tensors of these projections, without their biases."""
        return sum(
            size
            for entry in self._state["shards"].values()
            for name, size in entry["tensors"].items()
            if name.rpartition(".")[0] in projections and not name.endswith(".bias")
        )

    def finish(
        self, original: pathlib.Path, config: dict[str, Any], quantization: dict[str, Any], report: dict[str, Any]
    ) -> None:
        """Makes the folder a model.

        Args:
            original: The folder whose tokenizer it gets.
            config: config.json without its `quantization_config`.
            quantization: config.json's `quantization_config`.
            report: What is to be known of the run; JSON.
        """
        shards = self._state["shards"]
        places = {name: shard for shard, entry in sorted(shards.items()) for name in entry["tensors"]}
        self._write_json(
            INDEX_FILE, {"metadata": {"total_size": self.tensor_bytes}, "weight_map": dict(sorted(places.items()))}
        )
        for name in _COPIED:
            if (original / name).is_file():
                self._write(name, (original / name).read_bytes())
        self._write_json(CONFIG_FILE, config | {"quantization_config": quantization})
        self._write_json(REPORT_FILE, {**report, "fingerprint": self._state["fingerprint"], "shards": shards})
        (self.path / STATE_FILE).unlink()

    def _check(self, fingerprint: dict[str, Any]) -> None:
        before = self._state.get("fingerprint", {})
        for key in sorted(before.keys() | fingerprint.keys()):
            if before.get(key) != fingerprint.get(key):
                raise QuantizeRefused(
                    f"OUT_FOLDER {self.path} is of another command: {key} was {before.get(key)}, is "
                    f"{fingerprint.get(key)}"
                )

    def _name(self, index: int) -> str:
        return f"model-{index + 1:05d}-of-{self._num_shards:05d}.safetensors"

    def _write_json(self, name: str, value: Any) -> None:
        self._write(name, (json.dumps(value, indent=2) + "\n").encode())

    def _write(self, name: str, data: bytes) -> None:
        partial = self.path / (name + TEMPORARY)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path / name)
        descriptor = os.open(self.path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
