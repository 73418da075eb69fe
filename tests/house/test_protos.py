"""The protos as another language's build finds them.

It has a folder, and protoc with nothing but its own well-known types.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"


@pytest.mark.parametrize("package", ["headrace/v1", "inference"])
def test_stubs_are_generated_from_the_folder_alone(tmp_path: pathlib.Path, package: str) -> None:
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / package).glob("*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        f"--python_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
    ]
    ended = subprocess.run([*command, *files], cwd=PROTOS, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / package).glob("*_pb2.py"))) == len(files)


def test_our_status_is_the_one_that_libraries_bring() -> None:
    from google.protobuf import descriptor_pb2
    from google.rpc import status_pb2
    from grpc_tools import protoc

    out = ROOT / "build" / "status.binpb"
    out.parent.mkdir(exist_ok=True)
    include = pathlib.Path(protoc.__file__).parent / "_proto"
    code = protoc.main(["", f"-I{PROTOS}", f"-I{include}", f"--descriptor_set_out={out}", "google/rpc/status.proto"])
    assert code == 0
    (ours,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    theirs = descriptor_pb2.FileDescriptorProto()
    status_pb2.DESCRIPTOR.CopyToProto(theirs)
    fields = [
        [(field.name, field.number, field.type, field.label, field.type_name) for field in file.message_type[0].field]
        for file in (ours, theirs)
    ]
    assert fields[0] == fields[1] and ours.message_type[0].name == "Status" and ours.package == theirs.package
    assert (ours.options.go_package, ours.options.java_package) == (
        theirs.options.go_package,
        theirs.options.java_package,
    )
