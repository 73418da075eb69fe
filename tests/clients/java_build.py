"""Builds the Java client and its examples once per state of their sources.

They are built outside of the checkout, for all processes of a test run.

Owns the copy in build/java-client and its lock. The copy has the repository's folders, because the
client's pom.xml takes the protos from ../../protos. Maven uses what the user's own repository has.
Our own artifact is installed into a folder of the copy, so that a test leaves nothing of ours where
other projects would find it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support import toolchains

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "java"
BUILD = ROOT / "build" / "java-client"
# What a build of the client reads: itself, and the protos that its stubs are generated from.
SOURCES = (CLIENT, ROOT / "protos" / "headrace", ROOT / "protos" / "google")
_DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:build-classpath"

# For JVMs that live for seconds: the optimizing compiler and the parallel collector cost more than
# they bring in that time.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

# What Maven says where it reaches no repository. An artifact that no repository has is an error of
# ours, and another message.
_UNREACHABLE = re.compile(
    r"Could not transfer artifact \S+|Failure to transfer \S+|Cannot access \S+ \(\S+\) in offline mode"
)


@dataclass(frozen=True)
class JavaBuild:
    """A built client.

    Attributes:
        folder: Copy of clients/java, compiled.
        repository: Folder that Maven is to use as its local repository: the user's own, and our
            artifact.
        classpath: Entries of a program that uses the client: our own jar and what it needs.
    """

    folder: pathlib.Path
    repository: pathlib.Path
    classpath: str


def maven(
    folder: pathlib.Path, *arguments: str, repository: pathlib.Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Runs mvn in a folder and returns what it printed; fails with it where Maven does.

    Left out where artifacts can't be had.
    """
    options = ["-q", "-B", f"-DargLine={SHORT_LIVED}", *([f"-Dmaven.repo.local={repository}"] if repository else [])]
    command = [toolchains.require(toolchains.MAVEN), *options, *arguments]
    variables = {**os.environ, "MAVEN_OPTS": SHORT_LIVED, **(env or {})}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0 and (unreachable := _UNREACHABLE.search(done.stdout)):
        toolchains.left_out(toolchains.MAVEN, f"Maven can't get an artifact ({unreachable[0]})")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    return done.stdout


def java_build() -> JavaBuild:
    """The build of the sources as they are; made by the first process that asks for it."""
    toolchains.require(toolchains.JAVA)
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, classpath, state = BUILD / "state", BUILD / "classpath", _state()
        if not stamp.exists() or stamp.read_text() != state or not _all_there(classpath.read_text()):
            stamp.unlink(missing_ok=True)
            classpath.write_text(_build())
            stamp.write_text(state)
        return JavaBuild(_copy(CLIENT), BUILD / "repository", classpath.read_text())


def _all_there(classpath: str) -> bool:
    return all(pathlib.Path(path).exists() for path in classpath.split(os.pathsep))


def _sources() -> list[pathlib.Path]:
    files = (path for folder in SOURCES for path in folder.rglob("*"))
    return sorted(path for path in files if path.is_file() and "target" not in path.relative_to(ROOT).parts)


def _copy(path: pathlib.Path) -> pathlib.Path:
    """Place of the repository's file or folder in the copy."""
    return BUILD / path.relative_to(ROOT)


def _state() -> str:
    """One hash of all names and contents."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in _sources():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _build() -> str:
    """Compiles and installs the client; returns the class path of programs that use it."""
    folder, repository = _copy(CLIENT), BUILD / "repository"
    # target/ stays, so that Maven compiles what changed; the copy keeps the times it goes by.
    for old in (folder / "src", folder / "examples", _copy(ROOT / "protos")):
        shutil.rmtree(old, ignore_errors=True)
    for path in _sources():
        target = _copy(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    _link_repository(repository)
    jars = BUILD / "jars"
    arguments = ("-DskipTests", "install", _DEPENDENCIES, f"-Dmdep.outputFile={jars}", "-Dmdep.includeScope=runtime")
    maven(folder, *arguments, repository=repository)
    jar = next((folder / "target").glob("headrace-client-*.jar"))
    return os.pathsep.join([str(jar), jars.read_text().strip()])


def _link_repository(repository: pathlib.Path) -> None:
    """A folder that shows what the user's repository has, and takes what is new by itself."""
    own = pathlib.Path.home() / ".m2" / "repository"
    for level in ("", "io", "io/github"):
        (repository / level).mkdir(parents=True, exist_ok=True)
        for link in (repository / level).iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()
        for entry in (own / level).glob("*"):
            link = repository / level / entry.name
            if not link.exists() and entry not in (own / "io", own / "io/github", own / "io/github/headrace"):
                link.symlink_to(entry)
