"""Which files of a repository are a model.

They are weights in safetensors or GGUF, tokenizer and configuration. Never a pickle and never code:
what is not in the lists below is not fetched. Pure; sizes and bytes are others' business.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Sequence

from headrace_hub.errors import BadName, HubRefused

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_READ_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "quantization-report.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# What other programs that share the cache look for beside it. A model is whole without.
OTHERS_FILES = (
    "quantize_config.json",
    "quant_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)
_GGUF = ".gguf"
# Parts of a model that is spread over several GGUF files, which are not read.
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Files that lie beside GGUF models and are none: vision towers, and what quantizing was guided by.
_GGUF_ASIDE = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MOST_SHARDS = 10_000


def small_files(files: Collection[str]) -> list[str]:
    """Returns configuration, tokenizer and, where weights are in shards, their index."""
    index = [INDEX_FILE] if INDEX_FILE in files and SINGLE_FILE not in files else []
    return [name for name in (*_READ_FILES, *OTHERS_FILES, *index) if name in files]


def is_folder_model(repo: str, files: Collection[str], file: str | None) -> bool:
    """Whether the repository is a folder of safetensors weights; else it has a GGUF file.

    Raises:
        HubRefused: it has neither.
    """
    has_weights = SINGLE_FILE in files or INDEX_FILE in files
    if file is None and CONFIG_FILE in files and has_weights:
        return True
    if any(name.endswith(_GGUF) for name in files):
        return False
    if file is not None:
        raise BadName(f"{repo} has no GGUF file, so that {file} can't name one")
    raise HubRefused(f"{repo} has no {_missing(files)}; {_instead(files)}")


def _missing(files: Collection[str]) -> str:
    return "GGUF file and no " + (f"{SINGLE_FILE} or {INDEX_FILE}" if CONFIG_FILE in files else CONFIG_FILE)


def _instead(files: Collection[str]) -> str:
    pickles = [name for name in sorted(files) if any(fnmatch.fnmatch(name, pattern) for pattern in _PICKLES)]
    if pickles:
        return f"its weights are pickles ({pickles[0]}), which can run code and are never fetched"
    return "safetensors and GGUF weights are what is served"


def gguf_file(repo: str, files: Collection[str], file: str | None) -> str:
    """The GGUF file that is asked for.

    Args:
        repo: ORG/NAME, for messages.
        files: names of all files of the repository.
        file: a file's name, or a part of it as in Q4_K_M, whatever the case; None: the only one.

    Raises:
        BadName: several fit, or none; the message lists what there is.
    """
    whole = sorted(name for name in files if name.endswith(_GGUF) and not _GGUF_ASIDE.search(name))
    models = [name for name in whole if not _GGUF_PART.search(name)]
    fitting = models if file is None else _fitting(models, file)
    if len(fitting) == 1:
        return fitting[0]
    if not models and whole:
        raise HubRefused(f"{repo}: its GGUF models are split into parts ({whole[0]}, ...), which are not read")
    if not models:
        raise HubRefused(f"{repo} has no GGUF file of a language model")
    reason = f"has {len(models)} GGUF files" if file is None else _mismatch(file, fitting, whole)
    shown = ", ".join(models[:30]) + (f" and {len(models) - 30} more" if len(models) > 30 else "")
    raise BadName(f"{repo} {reason}; name one as {repo}:{_short(models)} or with --file: {shown}")


def _fitting(models: Sequence[str], file: str) -> Sequence[str]:
    """The files that are called so, else those that have it as a part of their name.

    Q4_K is first looked for whole, then as the beginning of Q4_K_M.
    """
    exact = [name for name in models if name == file]
    whole = exact or [name for name in models if _fits(file, name)]
    return whole or [name for name in models if _fits(file, name, "-_./")]


def _fits(file: str, name: str, separators: str = "-./") -> bool:
    """Whether a part such as Q4_K_M stands in a file's name, between separators."""
    part = re.escape(file.removesuffix(_GGUF))
    pattern = rf"(^|[{separators}]){part}($|[{separators}])"
    return re.search(pattern, name.removesuffix(_GGUF), re.IGNORECASE) is not None


def _mismatch(file: str, fitting: Sequence[str], whole: Sequence[str]) -> str:
    if fitting:
        return f"has {len(fitting)} GGUF files that {file} fits"
    if any(_fits(file, _GGUF_PART.sub("", name)) for name in whole):
        return f"has {file} only split into parts, which are not read"
    return f"has no GGUF file {file}"


def _short(models: Sequence[str]) -> str:
    """An example of a part that names a file: what follows the last dash, or the name itself."""
    stem = models[0].removesuffix(_GGUF).rpartition("/")[2]
    part = stem.rpartition("-")[2]
    return part if sum(_fits(part, name) for name in models) == 1 else models[0]


def shards(index: bytes, repo: str, files: Collection[str]) -> list[str]:
    """Returns the files that an index of safetensors shards names, each once, in order.

    Raises:
        HubRefused: it is no such index, or names what the repository does not have.
    """
    try:
        named = sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HubRefused(f"{repo}: {INDEX_FILE} is no index of shards") from None
    if not named or len(named) > _MOST_SHARDS:
        raise HubRefused(f"{repo}: {INDEX_FILE} names {len(named)} files; 1 to {_MOST_SHARDS} are taken")
    for name in named:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise HubRefused(f"{repo}: {INDEX_FILE} names {str(name)[:80]!r}, which is no .safetensors file beside it")
        if name not in files:
            raise HubRefused(f"{repo}: {INDEX_FILE} names {name}, which the repository does not have")
    return named
