"""File systems without room, under what clients set and where their outputs go.

One refusal, and nothing lost.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import grpc
import pytest
from tests.support.running_server import ROOT, environment

from headrace_service.errors import ServiceError
from headrace_service.kserve.messages import shared_memory
from headrace_service.kserve.messages.shared_document import SharedDocument

_SIZE = 256 << 10
_ON_A_SMALL_DISK = """
mount -t tmpfs -o size=64k tmpfs "$1" && "$2" -m tests.kserve.test_full_folder "$1"; code=$?; umount "$1"; exit $code
"""


def test_a_full_file_system_costs_what_it_has_no_room_for_and_nothing_else(tmp_path: pathlib.Path) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace of its own, for a small tmpfs")
    command = [*namespace, "sh", "-c", _ON_A_SMALL_DISK, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(), cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr


def test_a_folder_that_is_gone_refuses_a_change(tmp_path: pathlib.Path) -> None:
    document = SharedDocument(tmp_path / "gone" / "d.json", {"a": 1})
    with pytest.raises(ServiceError, match="No such file or directory") as refused:
        document.update(lambda content: content.update(a=2))
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert document.read() == {"a": 1}


def test_a_file_that_can_not_be_read_leaves_what_was_known(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "d.json"
    document = SharedDocument(path, {})
    document.update(lambda content: content.update(a=1))
    path.unlink()
    # Unlike missing rights it stops root too.
    path.mkdir()
    assert document.read() == {"a": 1}


def _refused(act: object) -> ServiceError:
    try:
        act()  # type: ignore[operator]
    except ServiceError as refused:
        return refused
    raise AssertionError("nothing was refused")


def _try_a_document(folder: pathlib.Path) -> None:
    document, filler = SharedDocument(folder / "d.json", {}), folder / "filler"
    document.update(lambda content: content.update(a=1))
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    refused = _refused(lambda: document.update(lambda content: content.update(a=2)))
    assert refused.code is grpc.StatusCode.UNAVAILABLE and "No space left" in refused.message, refused
    assert SharedDocument(folder / "d.json", {}).read() == document.read() == {"a": 1}
    assert sorted(path.name for path in folder.iterdir()) == ["d.json", "d.lock", "filler"]
    filler.unlink()
    document.update(lambda content: content.update(a=2))
    assert SharedDocument(folder / "d.json", {}).read() == {"a": 2}


def _try_a_region(folder: pathlib.Path) -> None:
    """Writes to an object that is larger than the memory behind it.

    Shared memory that nobody has written may be so.
    """
    shared_memory._FOLDER = str(folder)
    with (folder / "object").open("wb") as file:
        os.truncate(file.fileno(), _SIZE)
    region = shared_memory.Placement("r", "object", 0, _SIZE)
    refused = _refused(lambda: region.write(b"x" * _SIZE))
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED, refused
    assert refused.message == "shared memory region 'r': the system has no memory left for it", refused


if __name__ == "__main__":
    _try_a_document(pathlib.Path(sys.argv[1]))
    _try_a_region(pathlib.Path(sys.argv[1]))
    print("held")
