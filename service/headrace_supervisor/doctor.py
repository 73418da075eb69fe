"""`headrace doctor`: what this machine can run, and why not.

Owns the checks and their verdicts. Each check looks at one thing and says what it found, what
follows, and whether serving is possible without it. Torch is asked in a process of its own, because
nothing else here may import it.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator

import psutil
import rich.box
import rich.console
import rich.markup
import rich.table

from headrace_backend.cards import Card, in_words, why_too_old
from headrace_hub.errors import HubRefused
from headrace_hub.resolve import Need, no_folder, resolve
from headrace_model_folder.draft_heads.mtp_folder import open_mtp
from headrace_model_folder.errors import InvalidModelFolder
from headrace_model_folder.folder import ModelFolder
from headrace_service.text.default_sampling import not_followed
from headrace_supervisor import config as configs
from headrace_supervisor.models.model_launches import ModelLaunches
from headrace_supervisor.processes.address import AddressError, claimed
from headrace_supervisor.refusals import Refused
from headrace_supervisor.repository import ModelRepository
from headrace_supervisor.settings import ConfigError

# One stream takes a descriptor or two in each process; fewer than this are used up by an ordinary
# number of clients.
_ENOUGH_FILES = 4096
_TORCH_PROBE = """
import json, torch
gpus, error = [], ""
if torch.version.cuda and not torch.cuda.is_available():
    try:
        torch.cuda.init()
    except Exception as reason:
        error = str(reason)
for index in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(index)
    gpus.append([properties.name, properties.major, properties.minor, properties.total_memory])
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "error": error}))
"""
_PROBE_TIMEOUT_S = 120.0


class Verdict(enum.StrEnum):
    """The meaning of a finding for a server that would start here."""

    OK = "ok"
    # Serving works, with less than could be had.
    LIMITED = "limited"
    # Serving works, and answers are wrong.
    DAMAGED = "damaged"
    # No server can run.
    MISSING = "missing"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor looked at, and what it found."""

    subject: str
    verdict: Verdict
    detail: str


def examine(
    listen: str, model: pathlib.Path | str | None, repository: pathlib.Path | None = None, reads_weights: bool = False
) -> list[Finding]:
    """All findings, in the order in which they matter.

    Args:
        listen: Address that a server would have.
        model: Model folder to look at as well, or the name of a model that was fetched.
        repository: Folder of models to look at as well.
        reads_weights: Whether the model's weights are loaded, which takes as long as a server's
            start, and are searched for mistakes of the tool that packed them.
    """
    findings = [
        _python(),
        *_packages(),
        *_torch_and_gpus(),
        _memory(),
        _cores(),
        _shared_memory(),
        _open_files(),
        _address(listen),
    ]
    findings += list(_named_model(model, reads_weights)) if model else []
    return findings + (list(_repository(repository)) if repository else [])


def can_serve(findings: list[Finding]) -> bool:
    """Whether nothing is missing, and nothing is damaged."""
    return all(finding.verdict not in (Verdict.MISSING, Verdict.DAMAGED) for finding in findings)


def report(findings: list[Finding], *, as_json: bool) -> None:
    """Prints the findings."""
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return
    colours = {Verdict.OK: "green", Verdict.LIMITED: "yellow", Verdict.DAMAGED: "red", Verdict.MISSING: "red"}
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
    for finding in findings:
        table.add_row(
            finding.subject, f"[{colours[finding.verdict]}]{finding.verdict}[/]", rich.markup.escape(finding.detail)
        )
    console = rich.console.Console(highlight=False)
    console.print(table)
    console.print(
        "This machine can serve."
        if can_serve(findings)
        else "This machine can't serve: see what is missing or damaged above."
    )


def _python() -> Finding:
    good = sys.version_info >= (3, 11) and sys.platform == "linux"
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(
        "Python",
        Verdict.OK if good else Verdict.MISSING,
        detail if good else f"{detail}; needed: 3.11 or newer on Linux",
    )


def _packages() -> Iterator[Finding]:
    for name in ("grpcio", "protobuf", "tokenizers", "numpy", "safetensors", "triton"):
        try:
            yield Finding(name, Verdict.OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, Verdict.MISSING, "not installed: pip install 'headrace-server[worker]'")


def _torch_and_gpus() -> list[Finding]:
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [Finding("torch", Verdict.MISSING, f"did not load within {_PROBE_TIMEOUT_S:.0f} s")]
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        return [
            Finding(
                "torch", Verdict.MISSING, f"can't be imported ({last[:200]}): pip install 'headrace-server[worker]'"
            )
        ]
    found = json.loads(probe.stdout.strip().splitlines()[-1])
    built_for = f"CUDA {found['cuda']}" if found["cuda"] else "CPU"
    return [
        Finding("torch", Verdict.OK, f"{found['version']}, built for {built_for}"),
        *_gpus(found["gpus"], found["cuda"], found["error"]),
    ]


def _gpus(gpus: list[tuple[str, int, int, int]], cuda: str | None, error: str = "") -> Iterator[Finding]:
    if not gpus:
        driver = _driver_version()
        reason = f"driver {driver}" if driver else "no NVIDIA driver"
        if driver and "too old" in error:
            reason += ", too old"
        yield Finding(
            "GPU",
            Verdict.LIMITED,
            f"none that torch can use ({reason}, torch for {cuda or 'CPU'}); models run on the CPU",
        )
    for index, (name, major, minor, memory_bytes) in enumerate(gpus):
        card = Card(name, (major, minor))
        too_old = why_too_old(card)
        advice = in_words(card) if too_old is None else f"{too_old}; --device cpu works"
        detail = (
            f"{name}, {card.generation}, {memory_bytes / 2**30:.0f} GiB, driver {_driver_version() or 'unknown'}; "
            f"{advice}"
        )
        yield Finding(f"GPU {index}", Verdict.OK if too_old is None else Verdict.LIMITED, detail)


def _driver_version() -> str:
    """Version of the NVIDIA kernel driver; empty if there is none."""
    try:
        return pathlib.Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    detail = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    return Finding("memory", Verdict.OK if memory.available > 2**30 else Verdict.LIMITED, detail)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    detail = f"{usable} usable" if usable > 1 else "1 usable; service, backend and worker share it"
    return Finding("cores", Verdict.OK if usable > 1 else Verdict.LIMITED, detail)


def _shared_memory() -> Finding:
    """Step plans travel in an anonymous file, wake-ups by eventfd; a sandbox may forbid either."""
    try:
        memory = os.memfd_create("headrace-doctor", os.MFD_CLOEXEC)
        os.ftruncate(memory, 1 << 20)
        os.close(memory)
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        return Finding("shared memory", Verdict.MISSING, f"memfd or eventfd: {error.strerror}")
    return Finding("shared memory", Verdict.OK, "memfd and eventfd work")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES
    advice = "" if enough else f"; many clients need more: ulimit -n {_ENOUGH_FILES}"
    return Finding("open files", Verdict.OK if enough else Verdict.LIMITED, f"at most {soft}{advice}")


def _address(listen: str) -> Finding:
    try:
        with claimed((listen,)):
            return Finding("address", Verdict.OK, f"{listen} is free")
    except AddressError as error:
        return Finding("address", Verdict.LIMITED, str(error))


def _named_model(model: pathlib.Path | str, reads_weights: bool) -> Iterator[Finding]:
    """A folder, or what the cache has of a name: a check fetches nothing."""
    try:
        folder = resolve(model, Need.CACHED).path
    except HubRefused as refused:
        yield Finding("model", Verdict.MISSING, str(refused))
        return
    yield _model(folder)
    if reads_weights:
        yield from _weights(folder)


def _model(folder: pathlib.Path) -> Finding:
    """The model as the server would load it, the settings of the environment included."""
    try:
        model = ModelFolder.open(folder)
        config = configs.load_server({"model": str(folder)}, None)
        ModelLaunches(config, folder).check(config.model_name)
    except InvalidModelFolder as error:
        return Finding("model", Verdict.MISSING, f"{folder}: {error}{no_folder(folder)}")
    except (ConfigError, Refused) as error:
        return Finding("model", Verdict.MISSING, str(error))
    found = f"{model.revision}, {model.config.architecture}, {model.parameter_count:,} parameters"
    advice = "; code of its own (auto_map) is not run" if model.config.names_own_code else ""
    return Finding("model", Verdict.OK, found + advice + _own_drafter(model) + _not_followed(model))


def _own_drafter(model: ModelFolder) -> str:
    """Whether a model that announces an MTP layer can draft with it."""
    if model.config.mtp is None:
        return ""
    try:
        open_mtp(model)
    except InvalidModelFolder as error:
        return f"; --speculate mtp does not work: {error}"
    return "; has an MTP layer: --speculate mtp works"


def _weights(folder: pathlib.Path) -> Iterator[Finding]:
    """What a process that loads the model says of its weights."""
    try:
        device = configs.load_server({"model": str(folder)}, None).backend.engine.device
    except ConfigError:
        # The finding of the model says so.
        return
    command = [sys.executable, "-m", "headrace_backend.packing", str(folder), device]
    # How far it is goes to this process's stderr, and why it can't go on.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        how = f"exit code {done.returncode}; the lines above say more"
        yield Finding("weights", Verdict.MISSING, f"can't be loaded ({how})")
        return
    answer = json.loads(done.stdout)
    if answer["refused"]:
        yield Finding("weights", Verdict.MISSING, answer["refused"])
    for fault in answer["faults"]:
        yield Finding("weights", Verdict.DAMAGED, fault)
    if not answer["refused"] and not answer["faults"]:
        looked_at = f", {answer['num_layers']} quantized layers look packed as the folder says"
        yield Finding("weights", Verdict.OK, f"every number is finite{looked_at if answer['num_layers'] else ''}")


def _not_followed(model: ModelFolder) -> str:
    """What of generation_config.json requests do not get."""
    return "".join(f"; generation_config.json: {line}" for line in not_followed(model.generation_defaults))


def _repository(folder: pathlib.Path) -> Iterator[Finding]:
    """Each model as the server would load it, the settings of the environment included.

    A bad one keeps no other from being served.
    """
    names = ModelRepository(folder).names()
    if not names:
        yield Finding("repository", Verdict.LIMITED, f"{folder}: has no subfolder with a config.json or a GGUF file")
        return
    try:
        launches = ModelLaunches(
            configs.load_server({"model": names[0], "model_repository": str(folder)}, None), folder
        )
    except ConfigError as error:
        yield Finding("repository", Verdict.LIMITED, str(error))
        return
    for name in names:
        try:
            claim = launches.check(name)[0]
            model = ModelFolder.open(folder / name, require_weights=False)
        except (Refused, InvalidModelFolder) as refused:
            yield Finding(f"model {name}", Verdict.LIMITED, str(refused))
            continue
        budget = f"memory budget {claim.budget_bytes / 2**30:.2f} GiB" if claim.budget_bytes else "no memory budget"
        advice = "" if claim.budget_bytes or claim.device == "cpu" else "; it can't share a GPU without one"
        yield Finding(f"model {name}", Verdict.OK, f"can be loaded, {budget}{advice}{_not_followed(model)}")
