"""A service process's entry, whatever wire it speaks: `--config-json FILE` (or `-` for stdin).

`python -m headrace_service` speaks gRPC, `python -m headrace_service.openai` OpenAI's HTTP API.
Owns configuration, logs, event loop, exit codes. 0: shut down by signal; 2: it
can never run as configured (one line on stderr says why); 1: anything else.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import signal
import sys
from collections.abc import Callable

import pydantic
import uvloop

import headrace_facts.plain_structlog  # noqa: F401  # before anything that imports structlog
from headrace_credentials.files import CredentialError
from headrace_facts import pulse
from headrace_model_folder import InvalidModelFolder
from headrace_service import logs, service_process
from headrace_service.config import ServiceConfig
from headrace_service.errors import CannotStart
from headrace_service.service_process import ServiceProcess

_PR_SET_PDEATHSIG = 1


def main(kind: Callable[[ServiceConfig], ServiceProcess], arguments: list[str] | None = None) -> int:
    """Runs a service process of a kind until a signal stops it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="headrace_service", description="Headrace's front end")
    parser.add_argument(
        "--config-json", required=True, metavar="FILE", help="ServiceConfig as JSON; - reads standard input"
    )
    pulse.add_argument(parser)
    options = parser.parse_args(arguments)
    path: str = options.config_json
    try:
        config = ServiceConfig.model_validate_json(sys.stdin.read() if path == "-" else pathlib.Path(path).read_text())
        logs.configure(config.log_format, config.log_level)
        if config.exit_with_parent:
            _exit_with_parent()
        uvloop.run(_run(config, kind, options.pulse_fd))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        return _refuse(f"configuration: {'.'.join(map(str, problem['loc']))}: {problem['msg']}")
    except (CannotStart, CredentialError, InvalidModelFolder) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or path}: {error.strerror}")
    return 0


async def _run(config: ServiceConfig, kind: Callable[[ServiceConfig], ServiceProcess], pulse_fd: int | None) -> None:
    pulse.start(pulse_fd)
    await service_process.run(config, kind)


def _refuse(why: str) -> int:
    print(f"headrace service: {why}", file=sys.stderr)
    return 2


def _exit_with_parent() -> None:
    """Asks Linux for SIGKILL when the parent dies; ends at once if it is dead already.

    The parent's other children, the backend too, end with it.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        raise SystemExit(0)
