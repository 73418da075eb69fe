"""Entry of the worker process: arguments, the tie to the parent, the model folder, how it ends.

Owns exit codes and the last message: 0 after SHUTDOWN; 2 with `WorkerFailed(invalid_model=True)`
where model or configuration are at fault and a restart can't help; 1 with `WorkerFailed` for
anything else. Itself without torch, so that a bad folder is refused before the seconds that
importing torch takes; but a worker that is started early (`--early`) imports first, while the
backend makes its arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType

import pydantic

from headrace_backend.config import EngineConfig
from headrace_backend.parallel.errors import PeerLost
from headrace_backend.spinning import bound_spinning
from headrace_backend.step.handover import handed_over
from headrace_backend.step.meeting import MeetingPoint
from headrace_backend.step.messages import TORCH_PHASE, WorkerFailed
from headrace_backend.step.ring import RingDescriptors, RingReader, RingWriter
from headrace_backend.worker.channel import Channel, FollowerChannel, RankLinks
from headrace_backend.worker.errors import DoesNotFit, StartRefused, StepFailed, one_line
from headrace_backend.worker.lifetime import arrange_signals, die_with_parent
from headrace_facts import log_output
from headrace_facts.process_age import process_age_s
from headrace_kernels.quick_sources import quick_sources
from headrace_model_folder import InvalidModelFolder, ModelFolder

_FAILED = 1
_REFUSED = 2
_EARLY = "--early"


def _integers(count: int) -> Callable[[str], tuple[int, ...]]:
    """An argument type: `count` integers with commas between."""

    def descriptors(text: str) -> tuple[int, ...]:
        values = tuple(int(part) for part in text.split(","))
        if len(values) != count:
            raise ValueError(text)
        return values

    return descriptors


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headrace_backend.worker", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config-json", required=True, help="EngineConfig as JSON")
    parser.add_argument(
        "--plan-ring", required=True, type=_integers(4), help="MEMORY,DATA,SPACE,INDEX: descriptors and reader index"
    )
    parser.add_argument("--result-ring", required=True, type=_integers(3), help="MEMORY,DATA,SPACE: descriptors")
    parser.add_argument(
        "--rank", type=int, default=0, help="which of the ranks that share the model, stage after stage"
    )
    parser.add_argument("--follows", action="store_true", help="another rank reports the results of steps")
    parser.add_argument("--board", type=int, help="descriptor of the board on which the worker reports how far it is")
    parser.add_argument(
        "--store",
        type=int,
        help="descriptor of the file in which several ranks find each other, or with --meeting of the socket at which "
        "this rank lets them",
    )
    parser.add_argument(
        "--meeting",
        type=MeetingPoint.parse,
        help="ADDRESS,PORT,INTERFACE: where ranks of several hosts find each other, and this host's network to them",
    )
    # An argument, not looked up: a parent that died while this process was being loaded is its
    # parent no more.
    parser.add_argument("--parent-pid", type=int, required=True, help="the process that starts this one, to end with")
    return parser.parse_args(argv)


def _renumbered(arguments: argparse.Namespace, own: Mapping[int, int]) -> argparse.Namespace:
    """The arguments with this process's numbers for descriptors that came with them."""
    *plan_ring, index = arguments.plan_ring
    arguments.plan_ring = (*(own[number] for number in plan_ring), index)
    arguments.result_ring = tuple(own[number] for number in arguments.result_ring)
    for name in ("board", "store"):
        number = getattr(arguments, name)
        setattr(arguments, name, None if number is None else own[number])
    return arguments


def _open_channel(arguments: argparse.Namespace) -> Channel:
    """Maps both rings; the inherited descriptors are not needed any more then."""
    memory, data, space, index = arguments.plan_ring
    plans = RingReader(memory, data, space, index)
    RingDescriptors(memory, (data,), space).close()
    memory, data, space = arguments.result_ring
    result_ring = RingDescriptors(memory, (data,), space)
    results = RingWriter(result_ring)
    result_ring.close()
    kind = FollowerChannel if arguments.follows else Channel
    return kind(plans, results, arguments.parent_pid)


def main(argv: list[str]) -> int:
    """Runs the worker; returns its exit code.

    Raises:
        SystemExit: The arguments are wrong, or the parent is gone.
    """
    return _early(argv) if _EARLY in argv else _reported(_parse(argv), {"process": process_age_s()})


def _early(argv: list[str]) -> int:
    """Imports, waits for the arguments, and runs the worker; 0 if they never come."""
    parser = argparse.ArgumentParser(prog="python -m headrace_backend.worker", allow_abbrev=False)
    parser.add_argument(_EARLY, type=int, required=True, help="socket by which the arguments come (step.handover)")
    parser.add_argument("--rank", type=int, required=True, help="rank that the arguments will say")
    parser.add_argument("--parent-pid", type=int, required=True, help="the process that starts this one, to end with")
    early = parser.parse_args(argv)
    phases = {"process": process_age_s()}
    die_with_parent(early.parent_pid)
    arrange_signals()
    log_output.keep_going()
    began = time.monotonic()
    bound_spinning()
    # What can't be imported is tried again below, where there is a channel to say so.
    with contextlib.suppress(Exception):
        _loaded_start_up()
    phases["imports"] = (imported := time.monotonic()) - began
    with socket.socket(fileno=early.early) as channel:
        sent = handed_over(channel)
    if sent is None:
        return 0
    phases["waiting"] = time.monotonic() - imported
    return _reported(_renumbered(_parse(sent.arguments), sent.descriptors), phases)


def _reported(arguments: argparse.Namespace, phases: dict[str, float]) -> int:
    """Runs the worker and reports how it failed, if it did; its exit code."""
    die_with_parent(arguments.parent_pid)
    arrange_signals()
    log_output.keep_going()
    channel = _open_channel(arguments)
    try:
        _run(arguments, channel, phases)
    except (InvalidModelFolder, StartRefused, pydantic.ValidationError) as error:
        channel.send_message(
            WorkerFailed(one_line(error), invalid_model=True, does_not_fit=isinstance(error, DoesNotFit))
        )
        return _REFUSED
    except StepFailed as error:
        if isinstance(error.__cause__, PeerLost):
            return _end_after_peer(error.__cause__, channel)
        traceback.print_exception(error)
        channel.send_message(WorkerFailed(one_line(error.__cause__), invalid_model=False, step_id=error.step_id))
        return _FAILED
    except PeerLost as error:
        return _end_after_peer(error, channel)
    except Exception as error:
        traceback.print_exception(error)
        channel.send_message(WorkerFailed(one_line(error), invalid_model=False))
        return _FAILED
    return 0


def _end_after_peer(error: PeerLost, channel: Channel) -> int:
    """Another rank's end is reported as such, and without a stack: nothing of it is this rank's."""
    channel.send_message(WorkerFailed(one_line(error), invalid_model=False, peer_lost=True))
    return _FAILED


def _loaded_start_up() -> ModuleType:
    """Imports what loads the model, and torch with it.

    Modules stay: looking for garbage among them takes time now, and later between two steps.
    """
    gc.disable()
    try:
        # By name, so that torch is imported now and not with this file.
        with quick_sources():
            return importlib.import_module("headrace_backend.worker.start_up.start")
    finally:
        gc.freeze()
        gc.enable()


def _run(arguments: argparse.Namespace, channel: Channel, phases: dict[str, float]) -> None:
    """Takes steps until SHUTDOWN.

    Args:
        arguments: The command line.
        channel: To the backend.
        phases: Seconds of a start's phases until now.
    """
    config = EngineConfig.model_validate_json(arguments.config_json)
    started = time.monotonic()
    # A draft model's vocabulary is compared with the model's.
    reads_tokens = config.draft_model is not None
    folder = ModelFolder.open(config.model, require_weights=config.load == "folder", reads_tokens=reads_tokens)
    opened = time.monotonic()
    bound_spinning()
    channel.send_progress(TORCH_PHASE, 0, 1, "")
    start = _loaded_start_up()
    channel.send_progress(TORCH_PHASE, 1, 1, "")
    phases |= {"folder": opened - started}
    phases["imports"] = phases.get("imports", 0.0) + time.monotonic() - opened
    links = RankLinks(arguments.rank, arguments.board, arguments.store, arguments.meeting)
    start.start_worker(config, folder, channel, phases, links).run()
