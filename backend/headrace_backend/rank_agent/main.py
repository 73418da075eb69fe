"""Entry of the agent's process: configuration, signals, exit code.

It ends with 0 after SIGTERM or SIGINT, and with 2 and one line where trying again does not help.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import signal
import sys
from collections.abc import Sequence

import pydantic
import uvloop

import headrace_facts.plain_structlog  # noqa: F401  # before anything that imports structlog
from headrace_backend.rank_agent.agent import RankAgent
from headrace_backend.rank_agent.config import RanksConfig
from headrace_backend.rank_agent.joining import HostRefused, check_host
from headrace_backend.server.lifetime import ExitCode
from headrace_backend.server.logs import configure_logs, get_logger
from headrace_backend.server.workers.worker_process import DEFAULT_WORKER_COMMAND
from headrace_credentials.files import CredentialError
from headrace_facts import pulse
from headrace_health.probe import CannotProbe, Probe


def main(arguments: Sequence[str], worker_command: tuple[str, ...] = DEFAULT_WORKER_COMMAND) -> int:
    """Runs the agent until a signal ends it, or its engine does not want it.

    Args:
        arguments: Command line without the program.
        worker_command: What starts a worker; its own arguments are appended.

    Returns:
        An `ExitCode`.
    """
    parser = argparse.ArgumentParser(prog="headrace_backend.rank_agent", description=__doc__)
    parser.add_argument("--config-json", required=True, metavar="PATH", help="RanksConfig as JSON")
    pulse.add_argument(parser)
    options = parser.parse_args(arguments)
    try:
        config = RanksConfig.model_validate_json(pathlib.Path(options.config_json).read_bytes())
        configure_logs(config.log_format, config.log_level)
        uvloop.run(_run(config, worker_command, options.pulse_fd))
    except (OSError, pydantic.ValidationError, CredentialError, HostRefused, CannotProbe) as refused:
        print(f"headrace ranks: {refused}", file=sys.stderr, flush=True)
        return ExitCode.REFUSED
    return ExitCode.OK


async def _run(config: RanksConfig, worker_command: tuple[str, ...], pulse_fd: int | None) -> None:
    check_host(config)
    pulse.start(pulse_fd)
    loop = asyncio.get_running_loop()
    agent = RankAgent(config, worker_command)
    probe = None
    if config.probe is not None:
        probe = Probe(config.probe, lambda service: None if service else agent.has_joined)
        await probe.start()
    running = asyncio.ensure_future(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        get_logger("ranks").info("ended")
    finally:
        if probe is not None:
            await probe.stop()
