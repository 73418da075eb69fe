"""Generates the committed stubs from protos/, and with --check tells whether they drifted.

Public API (headrace.v1) -> clients/python/headrace/v1, inside the client distribution, which is all that a caller installs.
Private protocols (headrace_engine.v1, headrace_control.v1) -> protos/python/headrace_protos/engine/v1 and control/v1. A virtual proto path gives the private files an
import path under our own package, so that an installed wheel owns no top-level name but ours.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import pathlib
import sys
import tempfile

from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PUBLIC = ["headrace/v1/generation.proto", "headrace/v1/inference.proto", "headrace/v1/admin.proto"]
SERVICES = ["headrace/v1/inference.proto", "headrace/v1/admin.proto"]
PRIVATE = ("engine", "control")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def _google_protos() -> str:
    """Folder that holds google/rpc/*.proto (package googleapis-common-protos)."""
    spec = importlib.util.find_spec("google.rpc")
    assert spec is not None and spec.submodule_search_locations is not None
    return str(pathlib.Path(next(iter(spec.submodule_search_locations))).parent.parent)


def _wellknown_protos() -> str:
    """Folder of google/protobuf/*.proto inside grpcio-tools."""
    spec = importlib.util.find_spec("grpc_tools")
    assert spec is not None and spec.origin is not None
    return str(pathlib.Path(spec.origin).parent / "_proto")


def _run(arguments: list[str]) -> None:
    code = protoc.main(["protoc", *arguments, f"-I{_google_protos()}", f"-I{_wellknown_protos()}"])
    if code != 0:
        raise SystemExit(code)


def _python(paths: list[str], include: str, out: pathlib.Path, *, services: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    grpc = [f"--grpc_python_out={out}"] if services else []
    _run([f"-I{include}", f"--python_out={out}", f"--pyi_out={out}", *grpc, *paths])


def generate(client: pathlib.Path, private: pathlib.Path) -> None:
    """Writes all stubs below the two given package roots."""
    _python(PUBLIC, str(PROTOS), client, services=False)
    _run([f"-I{PROTOS}", f"--grpc_python_out={client}", *SERVICES])
    for name in PRIVATE:
        path = f"headrace_protos/{name}/v1/{name}.proto"
        _python([path], f"headrace_protos/{name}={PROTOS / f'headrace_{name}'}", private, services=True)


def image(target: pathlib.Path) -> None:
    """Writes a descriptor set with comments, which buf lints and compares."""
    sources = [*PUBLIC, *(f"headrace_{name}/v1/{name}.proto" for name in PRIVATE)]
    _run([f"-I{PROTOS}", "--include_imports", "--include_source_info", f"--descriptor_set_out={target}", *sources])


def _differences(fresh: pathlib.Path, committed: pathlib.Path) -> list[str]:
    names = {p.relative_to(fresh) for p in fresh.rglob("*") if p.name.endswith(SUFFIXES)}
    old = {p.relative_to(committed) for p in committed.rglob("*") if p.name.endswith(SUFFIXES)}
    changed = {n for n in names & old if not filecmp.cmp(fresh / n, committed / n, shallow=False)}
    return sorted(str(n) for n in (names ^ old) | changed)


def main() -> None:
    """Command line: no option regenerates, --check compares, --image FILE writes the descriptor set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed stubs are not what protos/ gives")
    parser.add_argument("--image", type=pathlib.Path, help="write a descriptor set for buf instead")
    options = parser.parse_args()
    client, private = ROOT / "clients" / "python", PROTOS / "python"
    if options.image:
        return image(options.image)
    if not options.check:
        return generate(client, private)
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        generate(scratch / "client", scratch / "private")
        drift = _differences(scratch / "client", client) + _differences(scratch / "private", private)
    if drift:
        sys.exit("generated stubs drifted from protos/ (run `make protos`): " + ", ".join(drift))
    return None


if __name__ == "__main__":
    main()
