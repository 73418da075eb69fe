"""Rows of `accuracy` that were measured already.

With them a table can be made again, go on after an interruption, or have one row more.

Owns when a row may be used again: only for the same case, questions and texts, on the same code,
model and torch, byte for byte. A row says itself when, where and at which commit it was measured,
and which questions were answered right, because differences are paired.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import torch

from benchmarks.accuracy_divergence import Divergence
from benchmarks.figures import ROOT, files_digest

# What a row depends on. The folders hold code alone; of the model's the scripts make the questions.
_CODE = ("backend", "both_sides", "kernels", "models/demo/scripts", "service/headrace_supervisor")
_FILES = ("benchmarks/accuracy*.py", "benchmarks/engine_session.py", "models/demo/*.json", "models/demo/*.safetensors")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One case as it was measured."""

    name: str
    bits_per_weight: float
    # Of tensors, see GetModel. None where the original was not at hand.
    mean_relative_error: float | None
    # Of a token in the KV cache, all layers.
    kv_bytes_per_token: int
    # Question by question.
    right: list[bool]
    divergence: Divergence
    seconds: float
    # See `figures.provenance`.
    about: dict[str, Any]


@functools.cache
def code_digest() -> str:
    """Digest of everything that a row's figures may depend on."""
    paths = [path for folder in _CODE for path in (ROOT / folder).rglob("*.py")]
    paths += [path for pattern in _FILES for path in ROOT.glob(pattern)]
    return f"torch {torch.__version__}, {files_digest(paths)}"


class Rows:
    """A folder with a file for each row."""

    def __init__(self, folder: pathlib.Path, of: str, num_questions: int, num_documents: int) -> None:
        """`of`: which table."""
        self._folder, self._of = folder, of
        self._sizes = {"questions": num_questions, "documents": num_documents}

    def find(self, case: dict[str, Any]) -> Row | None:
        """The row of a case, if it was measured as it would be now."""
        try:
            record = json.loads(self._path(case).read_text(encoding="utf-8"))
            if record.pop("key") != self._key(case):
                return None
            return Row(**record | {"divergence": Divergence(**record["divergence"])})
        except (FileNotFoundError, json.JSONDecodeError):
            # A file that an interruption cut short is none.
            return None

    def keep(self, case: dict[str, Any], row: Row) -> None:
        """Writes a row."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path(case).write_text(json.dumps({"key": self._key(case), **dataclasses.asdict(row)}), encoding="utf-8")

    def _key(self, case: dict[str, Any]) -> dict[str, Any]:
        return {"case": case, **self._sizes, "code": code_digest()}

    def _path(self, case: dict[str, Any]) -> pathlib.Path:
        return self._folder / f"{self._of}-{re.sub(r'[^a-z0-9]+', '-', case['name'])}.json"
