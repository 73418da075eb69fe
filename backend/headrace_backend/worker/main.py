"""Entry of the worker process: arguments, the tie to the parent, the model folder, and how the process ends.

Owns exit codes and the last message: 0 after SHUTDOWN; 2 with `WorkerFailed(invalid_model=True)` where model or configuration are at fault and a restart can't
help; 1 with `WorkerFailed` for anything else. Itself without torch, so that a bad folder is refused before the seconds that importing torch takes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
import traceback
from collections.abc import Callable

import pydantic

from headrace_backend.config import EngineConfig
from headrace_backend.ring import RingDescriptors, RingReader, RingWriter
from headrace_backend.worker.channel import Channel
from headrace_backend.worker.errors import DoesNotFit, StartRefused, StepFailed
from headrace_backend.worker.lifetime import arrange_signals, die_with_parent
from headrace_backend.worker_messages import WorkerFailed
from headrace_model_folder import InvalidModelFolder, ModelFolder

_FAILED = 1
_REFUSED = 2
_MAX_REASON_CHARACTERS = 1000
_SPIN_COUNT = "1000"


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
    parser.add_argument("--rank", type=int, choices=[0], default=0, help="only 0: a model runs on one device")
    parser.add_argument(
        "--parent-pid", type=int, default=os.getppid(), help="process to end with (default: the parent)"
    )
    return parser.parse_args(argv)


def _open_channel(arguments: argparse.Namespace) -> Channel:
    """Maps both rings; the inherited descriptors are not needed any more then."""
    memory, data, space, index = arguments.plan_ring
    plans = RingReader(memory, data, space, index)
    RingDescriptors(memory, (data,), space).close()
    memory, data, space = arguments.result_ring
    result_ring = RingDescriptors(memory, (data,), space)
    results = RingWriter(result_ring)
    result_ring.close()
    return Channel(plans, results, arguments.parent_pid)


def main(argv: list[str]) -> int:
    """Runs the worker; returns its exit code.

    Raises:
        SystemExit: The arguments are wrong, or the parent is gone.
    """
    arguments = _parse(argv)
    die_with_parent(arguments.parent_pid)
    arrange_signals()
    channel = _open_channel(arguments)
    try:
        _run(arguments.config_json, channel)
    except (InvalidModelFolder, StartRefused, pydantic.ValidationError) as error:
        channel.send_message(
            WorkerFailed(_one_line(error), invalid_model=True, does_not_fit=isinstance(error, DoesNotFit))
        )
        return _REFUSED
    except StepFailed as error:
        traceback.print_exception(error)
        channel.send_message(WorkerFailed(_one_line(error.__cause__), invalid_model=False, step_id=error.step_id))
        return _FAILED
    except Exception as error:
        traceback.print_exception(error)
        channel.send_message(WorkerFailed(_one_line(error), invalid_model=False))
        return _FAILED
    return 0


def _run(config_json: str, channel: Channel) -> None:
    config = EngineConfig.model_validate_json(config_json)
    started = time.monotonic()
    folder = ModelFolder.open(config.model, require_weights=config.load == "folder")
    opened = time.monotonic()
    _bound_spinning()
    # By name, so that torch is imported now and not with this file.
    start_up = importlib.import_module("headrace_backend.worker.start_up")
    phases = {"folder": opened - started, "imports": time.monotonic() - opened}
    start_up.start_worker(config, folder, channel, phases).run()


def _bound_spinning() -> None:
    """Has OpenMP's threads sleep soon when they wait for each other; must happen before torch loads the library.

    By default they spin for milliseconds. That is the fastest on idle cores (3 threads of 4, demo model: 3.2 ms a step against 3.7), but where other processes
    want the cores too, each spins away the time that the one it waits for needs: 184 to 837 ms a step against 11 to 13. Whoever sets the variable decides.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def _one_line(error: BaseException | None) -> str:
    """An error as the last message tells it. What the user can mend speaks for itself; anything else needs its class."""
    text = " ".join(str(error).split())
    if not isinstance(error, (InvalidModelFolder, StartRefused)):
        text = f"{type(error).__name__}: {text}"
    return text[:_MAX_REASON_CHARACTERS]
