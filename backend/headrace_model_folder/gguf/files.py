"""Whether a model is a GGUF file: named itself, or alone in a folder that has no config.json."""

from __future__ import annotations

import pathlib

from headrace_model_folder.bounded_files import exists_inside
from headrace_model_folder.config import CONFIG_FILE
from headrace_model_folder.errors import InvalidModelFolder

GGUF_SUFFIX = ".gguf"


def find_gguf(path: pathlib.Path | str) -> tuple[pathlib.Path, str] | None:
    """Folder and name of the GGUF file that a path means.

    None if it means a Hugging Face folder, or nothing that is there.

    Raises:
        InvalidModelFolder: a folder with several GGUF files and no config.json.
    """
    path = pathlib.Path(path)
    try:
        if path.suffix == GGUF_SUFFIX and path.is_file():
            # The name stays as it was given: where it is a link, what it leads to may be called
            # anything.
            return path.parent.resolve(), path.name
        if not path.is_dir() or exists_inside(path, CONFIG_FILE):
            return None
        files = sorted(entry.name for entry in path.iterdir() if entry.suffix == GGUF_SUFFIX)
    except (OSError, RuntimeError, ValueError):
        return None
    if len(files) > 1:
        raise InvalidModelFolder(f"{path}: has several GGUF files, name one of them: {', '.join(files[:4])}")
    return (path.resolve(), files[0]) if files else None
