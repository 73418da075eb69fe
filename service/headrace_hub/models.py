"""From a model's name to its folder or file: the order of steps, and what is said on the way.

    commit ─> files at the commit ─> which of them ─> missing blobs ─> links of the snapshot ─> ref

A ref moves last, so that a server that starts by name finds the last model that was whole.
"""

from __future__ import annotations

import fnmatch
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace_hub import blobs, choice, hub
from headrace_hub.blobs import Origin
from headrace_hub.cache import RepositoryCache
from headrace_hub.errors import BadName, HubRefused
from headrace_hub.hub import HubFile
from headrace_hub.names import HubName
from headrace_hub.progress import in_words, shown_progress


class FoundModel(NamedTuple):
    """A model that is on this machine, whole.

    Attributes:
        path: its folder, or its GGUF file.
        commit: the commit that it is of.
    """

    path: pathlib.Path
    commit: str


def pull(name: HubName) -> FoundModel:
    """Fetches what the cache lacks of a model's newest commit, or of the one asked for.

    Raises:
        HubRefused: it can't be had; the message is one sentence.
    """
    with hub.explained(name):
        return _pulled(name)


def _pulled(name: HubName) -> FoundModel:
    if hub.is_offline() and (found := cached(name)) is not None:
        _say(f"{name.repo} is at commit {found.commit}, from the cache (HF_HUB_OFFLINE is set)")
        return found
    cache = _cache(name)
    commit = hub.commit_of(name)
    _say(f"{name.repo} is at commit {commit}" + ("" if name.is_pinned else f" ({name.branch})"))
    files = hub.files_at(name, commit)
    chosen = _chosen(name, files, lambda small: _fetched_text(name, commit, cache, files, small))
    _fetch(Origin(name, commit), cache, [files[path] for path in chosen])
    _link(Origin(name, commit), cache, [files[path] for path in chosen])
    cache.point(name.branch, commit)
    return FoundModel(_place(cache, commit, chosen), commit)


def cached(name: HubName) -> FoundModel | None:
    """A model that the cache has whole, at the commit that was fetched last. Asks nobody.

    Raises:
        BadName: offline, where a newer list of files can't be had, none or several of them fit.
    """
    cache = _cache(name)
    commit = cache.commit(name.branch)
    if commit is None or not cache.snapshot(commit).is_dir():
        return None
    present = cache.present(commit)
    known = hub.files_known(name, commit)
    files = present if known is None else list(known)
    try:
        chosen = _chosen(name, dict.fromkeys(files), lambda small: _read(cache.snapshot(commit) / small))
    except BadName:
        if hub.is_offline():
            raise
        return None
    except (HubRefused, OSError):
        return None
    is_whole = set(chosen).difference(choice.OTHERS_FILES) <= set(present)
    return FoundModel(_place(cache, commit, chosen), commit) if is_whole else None


def found_or_pulled(name: HubName) -> FoundModel:
    """Returns a model from the cache as it is there, else fetches it. Raises HubRefused."""
    with hub.explained(name):
        found = cached(name)
    if found is None:
        return pull(name)
    _say(f"{name.repo} is at commit {found.commit}, from the cache (headrace pull {name} looks for a newer one)")
    return found


def config_folder(name: HubName) -> pathlib.Path:
    """A folder with the model's config.json and, of weights in shards, their index.

    Fetched if need be, without any weights. Raises HubRefused.
    """
    cache = _cache(name)
    commit = cache.commit(name.branch)
    if commit is None or not (cache.snapshot(commit) / choice.CONFIG_FILE).is_file():
        commit = hub.commit_of(name)
        hub.fetch_small(name, commit, choice.CONFIG_FILE)
        hub.fetch_if_there(name, commit, choice.INDEX_FILE)
    return cache.snapshot(commit)


def _cache(name: HubName) -> RepositoryCache:
    return RepositoryCache(hub.cache_folder(), name)


def _chosen(name: HubName, files: Mapping[str, object], read: Callable[[str], bytes]) -> list[str]:
    """Names of the files that are the model. `read` returns a small file's bytes."""
    if not choice.is_folder_model(name.repo, files, name.file):
        return [choice.gguf_file(name.repo, files, name.file)]
    small = choice.small_files(files)
    if choice.INDEX_FILE not in small:
        return [*small, choice.SINGLE_FILE]
    return [*small, *choice.shards(read(choice.INDEX_FILE), name.repo, files)]


def _fetched_text(name: HubName, commit: str, cache: RepositoryCache, files: Mapping[str, HubFile], path: str) -> bytes:
    """A small file's bytes, from the hub if the cache lacks them."""
    _fetch(Origin(name, commit), cache, [files[path]])
    return _read(cache.blob(files[path].digest))


def _read(path: pathlib.Path) -> bytes:
    return path.read_bytes()


def _fetch(origin: Origin, cache: RepositoryCache, files: list[HubFile]) -> None:
    missing = blobs.missing(cache, files)
    if not missing:
        return
    blobs.check_space(origin.name, cache, missing)
    total = sum(file.num_bytes for file in missing)
    _say(f"fetching {len(missing)} of {len(files)} files, {in_words(total)}, into {cache.folder}")
    with shown_progress(total, len(missing)) as progress:
        blobs.fetch(origin, cache, missing, progress)


def _link(origin: Origin, cache: RepositoryCache, files: list[HubFile]) -> None:
    """Makes the snapshot's links to the blobs, and keeps the list of files.

    Raises:
        HubRefused: the hub named another hash for a file than a moment ago.
    """
    hub.link_snapshot(origin.name, origin.commit, [file.path for file in files])
    for file in files:
        link = cache.snapshot(origin.commit) / file.path
        if link.is_symlink() and link.readlink().name != file.digest:
            raise HubRefused(f"{file.path} of {origin.name.repo} has two hashes: the hub's list of files says another")


def _place(cache: RepositoryCache, commit: str, chosen: list[str]) -> pathlib.Path:
    snapshot = cache.snapshot(commit)
    [first, *others] = chosen
    return snapshot / first if not others and fnmatch.fnmatch(first, "*.gguf") else snapshot


def _say(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)
