"""Generates the Java client's stubs from protos/: messages by protoc, services by grpc-java's
plugin.

Public API (headrace.v1) -> clients/java/src/generated/java, part of the client's own jar. Both
programs come from Maven's repository, through mvn, in the versions that clients/java/pom.xml gives
to the libraries (a stub must not be newer than its library), and only with the SHA-256 noted here.
They stay in build/protoc-java. grpcio-tools, which generate.py uses otherwise, has no Java in it:
it reads protos/ and hands over descriptors.
"""

from __future__ import annotations

import hashlib
import pathlib
import platform
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

from google.protobuf import descriptor_pb2

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLIENT = ROOT / "clients" / "java"
# Root of the committed stubs.
MODULE = CLIENT / "src" / "generated" / "java"
TOOLS = ROOT / "build" / "protoc-java"
SUFFIXES = (".java",)
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
# Group, artifact, and the property of pom.xml that has its version.
_PROGRAMS = (("com.google.protobuf", "protoc", "protobuf"), ("io.grpc", "protoc-gen-grpc-java", "grpc"))
# Platform -> name of Maven's classifier.
_CLASSIFIERS = {("Linux", "x86_64"): "linux-x86_64"}
# To take another version: change pom.xml, run `make protos`, compare what it reports with what the
# project publishes, and note it here.
_SHA256 = {
    "protoc-4.33.6-linux-x86_64.exe": "bdf948836dcd45f5595eb45e0824867965ac1227cc430e957b0482b4fe876d01",
    "protoc-gen-grpc-java-1.80.0-linux-x86_64.exe": "75a164477dfde4dfc4ad42f0ab8fe592eafe0da461fd061e672bec52d31d297d",
}


def missing() -> str | None:
    """What keeps this machine from generating Java stubs; None where nothing does.

    Fetches the programs the first time.

    Raises:
        SystemExit: A program is not the one that is noted here.
    """
    classifier = _CLASSIFIERS.get((platform.system(), platform.machine()))
    if classifier is None:
        return f"no protoc of Java's is noted for {platform.system()} {platform.machine()}"
    for group, artifact, library in _PROGRAMS:
        path = TOOLS / f"{artifact}-{_version_in_pom(library)}-{classifier}.exe"
        if not path.exists() and (error := _fetch(f"{group}:{artifact}:{_version_in_pom(library)}:exe:{classifier}")):
            return error
        _verify(path)
    return None


def generate(protoc: Callable[[list[str]], None], sources: list[str], services: list[str], out: pathlib.Path) -> None:
    """Writes the stubs below `out`, in place of those that are there; `missing` said None before.

    Args:
        protoc: Runs grpcio-tools' protoc with these arguments; the include paths of protos/ and of
            Google's are its own.
        sources: All files of the public API.
        services: Those of them that define services.
        out: Exists already.
    """
    for old in out.rglob("*.java"):
        old.unlink()
    ours, plugin = (next(TOOLS.glob(f"{artifact}-{_version_in_pom(library)}-*")) for _, artifact, library in _PROGRAMS)
    with tempfile.TemporaryDirectory() as name:
        described = pathlib.Path(name) / "files.binpb"
        protoc(["--include_imports", "--include_source_info", f"--descriptor_set_out={described}", *sources])
        _forget_json_names(described)
        run = [str(ours), f"--descriptor_set_in={described}"]
        subprocess.run([*run, f"--java_out={out}", *sources], check=True)
        grpc = [f"--plugin=protoc-gen-grpc-java={plugin}", f"--grpc-java_out={out}"]
        subprocess.run([*run, *grpc, *services], check=True)


def _forget_json_names(described: pathlib.Path) -> None:
    """Takes out what protoc filled in, so that the stubs' comments show fields as the files have
    them.
    """
    files = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes())
    messages = [message for file in files.file for message in file.message_type]
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    described.write_bytes(files.SerializeToString())


def _version_in_pom(library: str) -> str:
    """The version that pom.xml gives to a library, as its property `<library>.version`."""
    version = ElementTree.parse(CLIENT / "pom.xml").findtext(f"{{*}}properties/{{*}}{library}.version")
    assert version is not None, f"pom.xml has no property {library}.version"
    return version


def _fetch(artifact: str) -> str | None:
    """Copies a program into TOOLS; what Maven says where it can't."""
    maven = shutil.which("mvn")
    if maven is None:
        return "there is no `mvn` on PATH"
    command = [maven, "-q", "-B", _COPY, f"-Dartifact={artifact}", f"-DoutputDirectory={TOOLS}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return None if done.returncode == 0 else ([*done.stdout.strip().splitlines(), "no reason given"])[0]


def _verify(path: pathlib.Path) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != _SHA256.get(path.name):
        path.unlink()
        raise SystemExit(
            f"{path.name} has SHA-256 {found}, which is not the one noted in {pathlib.Path(__file__).name}"
        )
    path.chmod(0o755)
