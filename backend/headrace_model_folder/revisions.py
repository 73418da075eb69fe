"""What tells one model's files from another's: NAME@DIGEST, of small files, headers and samples.

Weights are not read whole, so that a revision takes milliseconds whatever their size.
"""

from __future__ import annotations

import hashlib
import pathlib

from headrace_model_folder.bounded_files import read_bytes, read_samples
from headrace_model_folder.config import CONFIG_FILE
from headrace_model_folder.tensor_index import TensorIndex


def of_folder(folder: pathlib.Path, tokenizer: bytes | None, index: TensorIndex) -> str:
    """Returns the revision of a folder of safetensors files, with its tokenizer if it has one."""
    parts = [read_bytes(folder, CONFIG_FILE, 1 << 30), tokenizer or b""]
    for file, header in sorted(index.headers.items()):
        parts += [file.encode(), header.file_size.to_bytes(8, "little"), header.raw, read_samples(folder, file)]
    return f"{folder.name}@{_digest(parts)}"


def of_gguf(folder: pathlib.Path, file: str, header_digest: bytes) -> str:
    """Returns the revision of a GGUF file."""
    return f"{pathlib.PurePath(file).stem}@{_digest([header_digest, read_samples(folder, file)])}"


def are_alike(revision: str, other: str) -> bool:
    """Whether two revisions are of the same files, whatever their folders are called."""
    return revision.rpartition("@")[2] == other.rpartition("@")[2]


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:12]
