"""A file's bytes, from the hub into the cache: resumed where they stopped, believed when hashed.

Bytes gather in a partial file that outlives the process, while their hash grows with them; a
connection that breaks is opened again behind the last byte. What the hash does not confirm is
removed and refused by name.

Owns requests, retries, hashes and the place that the disk must have. huggingface_hub downloads as
well, but (as of 2.4) it throws away what a broken download had, and does not hash what came over
HTTP.
"""

from __future__ import annotations

import hashlib
import pathlib
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, NamedTuple

import httpx2
from huggingface_hub.utils import WeakFileLock, hf_raise_for_status, http_stream_backoff

from headrace_hub import hub
from headrace_hub.cache import RepositoryCache
from headrace_hub.errors import HubRefused
from headrace_hub.hub import HubFile
from headrace_hub.names import HubName
from headrace_hub.progress import Progress, in_words

_CHUNK_BYTES = 1 << 20
# Broken connections in a row, none of which brought a byte, after which a download gives up.
_MOST_FRUITLESS = 5
_RETRY_DELAY_S = 1.0
_LOCK_PATIENCE_S = 1.0
_WORKERS = 4
# A full disk stops more than this download.
_SPARE_BYTES = 64 << 20


class Interrupted(Exception):  # an outcome
    """Another file of the same download failed, or the user left."""


class Origin(NamedTuple):
    """A repository at a commit."""

    name: HubName
    commit: str


def missing(cache: RepositoryCache, files: Sequence[HubFile]) -> list[HubFile]:
    """Returns the files whose bytes the cache lacks, each hash once."""
    absent = {file.digest: file for file in files if not cache.blob(file.digest).exists()}
    return list(absent.values())


def bytes_here(cache: RepositoryCache, file: HubFile) -> int:
    """Bytes of a file that an earlier download left."""
    try:
        return cache.partial(file.digest).stat().st_size
    except OSError:
        return 0


def check_space(name: HubName, cache: RepositoryCache, files: Sequence[HubFile]) -> None:
    """Checks that the disk has the place for what is still to come. Raises HubRefused."""
    needed = sum(max(file.num_bytes - bytes_here(cache, file), 0) for file in files)
    place = next(folder for folder in cache.folder.parents if folder.exists())
    free = shutil.disk_usage(place).free
    if files and needed + _SPARE_BYTES > free:
        raise HubRefused(
            f"{name} takes {in_words(needed)} more, with {in_words(_SPARE_BYTES)} to spare, and {place} has "
            f"{in_words(free)} free; HF_HOME names another place"
        )


def fetch(origin: Origin, cache: RepositoryCache, files: Sequence[HubFile], progress: Progress) -> None:
    """Fetches the bytes of files, several at a time.

    Args:
        origin: the repository and its commit.
        cache: the place they go to.
        files: what is missing there.
        progress: hears of every byte.

    Raises:
        HubRefused: one can't be had, or is not what the hub says it is. Whatever came stays for the
            next try.
    """
    download = _Download(origin, cache, progress)
    todo = sorted(files, key=lambda file: -file.num_bytes)
    for thread in (threading.Thread(target=download.work, args=(todo,), daemon=True) for _ in range(_WORKERS)):
        thread.start()
        download.threads.append(thread)
    try:
        # In slices, so that Ctrl-C is heard.
        while any(thread.is_alive() for thread in download.threads):
            for thread in download.threads:
                thread.join(0.1)
    finally:
        download.stopped.set()
    if download.failure is not None:
        raise download.failure


class _Download:
    """Threads that share a list of files. The first failure stops all."""

    def __init__(self, origin: Origin, cache: RepositoryCache, progress: Progress) -> None:
        self._origin = origin
        self._cache = cache
        self._progress = progress
        self._lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.stopped = threading.Event()
        self.failure: BaseException | None = None

    def work(self, todo: list[HubFile]) -> None:
        """Takes files off the list until it is empty."""
        try:
            while (file := self._next(todo)) is not None:
                with hub.explained(self._origin.name):
                    self._fetch(file)
        except Interrupted:
            pass
        except BaseException as error:
            with self._lock:
                self.failure = self.failure or error
            self.stopped.set()

    def _next(self, todo: list[HubFile]) -> HubFile | None:
        with self._lock:
            return todo.pop(0) if todo and not self.stopped.is_set() else None

    def _fetch(self, file: HubFile) -> None:
        blob, partial = self._cache.blob(file.digest), self._cache.partial(file.digest)
        lock = self._cache.lock(file.digest)
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with self._alone(file, lock):
            # Another process may have fetched it meanwhile.
            if not blob.exists():
                self._gather(file, partial)
                partial.replace(blob)
        self._progress.finish(file.path)

    @contextmanager
    def _alone(self, file: HubFile, lock: pathlib.Path) -> Iterator[None]:
        """Holds the lock of a blob, which another process that fetches it may have for long."""
        with ExitStack() as held:
            try:
                held.enter_context(WeakFileLock(lock, timeout=_LOCK_PATIENCE_S))
            except TimeoutError:
                self._progress.note(f"{file.path}: another process fetches it; waiting")
                held.enter_context(WeakFileLock(lock))
            yield

    def _gather(self, file: HubFile, partial: pathlib.Path) -> None:
        """Fills the partial file and compares its hash. Raises HubRefused."""
        with partial.open("ab+", buffering=0) as output:
            gathering = _Gathering(file, output)
            self._progress.begin(file.path, file.num_bytes, gathering.num_bytes)
            self._stream_all(gathering)
        if gathering.digest.hexdigest() != file.digest or gathering.num_bytes != file.num_bytes:
            partial.unlink(missing_ok=True)
            raise HubRefused(_wrong(self._origin, gathering))

    def _stream_all(self, gathering: _Gathering) -> None:
        """Reads until all bytes are there, however often the connection breaks."""
        fruitless = 0
        while gathering.num_bytes < gathering.file.num_bytes:
            before = gathering.num_bytes
            try:
                self._stream(gathering)
                if gathering.num_bytes < gathering.file.num_bytes:
                    raise httpx2.RemoteProtocolError("the connection ended early")
            except httpx2.TransportError:
                fruitless = 0 if gathering.num_bytes > before else fruitless + 1
                if fruitless >= _MOST_FRUITLESS:
                    raise
                self._progress.note(
                    f"{gathering.file.path}: connection lost at {in_words(gathering.num_bytes)}, goes on"
                )
                if self.stopped.wait(_RETRY_DELAY_S):
                    raise Interrupted from None

    def _stream(self, gathering: _Gathering) -> None:
        """Reads one response into the file."""
        url = hub.file_url(self._origin.name, self._origin.commit, gathering.file.path)
        headers = hub.download_headers()
        if gathering.num_bytes:
            headers["range"] = f"bytes={gathering.num_bytes}-"
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=hub.read_timeout_s(), retry_on_exceptions=(), follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            if response.status_code != httpx2.codes.PARTIAL_CONTENT and gathering.num_bytes:
                # A server that knows no ranges begins anew.
                self._progress.advance(gathering.file.path, -gathering.num_bytes)
                gathering.restart()
            for chunk in response.iter_bytes():
                if self.stopped.is_set():
                    raise Interrupted
                gathering.add(chunk)
                self._progress.advance(gathering.file.path, len(chunk))
                if gathering.num_bytes > gathering.file.num_bytes:
                    return


class _Gathering:
    """A partial file that is open, and the hash of what it has."""

    def __init__(self, file: HubFile, output: IO[bytes]) -> None:
        self.file = file
        self._output = output
        self.num_bytes = 0
        self.digest = self._empty_digest()
        output.seek(0)
        while chunk := output.read(_CHUNK_BYTES):
            self.digest.update(chunk)
            self.num_bytes += len(chunk)
        if self.num_bytes > file.num_bytes:
            self.restart()

    def add(self, chunk: bytes) -> None:
        """Appends bytes."""
        view = memoryview(chunk)
        while view:
            view = view[self._output.write(view) :]
        self.digest.update(chunk)
        self.num_bytes += len(chunk)

    def restart(self) -> None:
        """Forgets all bytes."""
        self._output.truncate(0)
        self.num_bytes = 0
        self.digest = self._empty_digest()

    def _empty_digest(self) -> hashlib._Hash:
        """SHA-256 of the bytes, or git's SHA-1 of the blob: its kind and length, then the bytes."""
        if self.file.has_sha256:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.file.num_bytes}\0".encode(), usedforsecurity=False)


def _wrong(origin: Origin, gathering: _Gathering) -> str:
    kind = "SHA-256" if gathering.file.has_sha256 else "git hash"
    return (
        f"{gathering.file.path} of {origin.name.repo} is not what the hub says: its {kind} is "
        f"{gathering.digest.hexdigest()}, at commit {origin.commit[:12]} it is {gathering.file.digest}; it was removed"
    )
