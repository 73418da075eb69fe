"""The telemetry process: `python -m headrace_telemetry --config-json FILE` (or `-` for stdin).

Owns the process's entry: configuration, logs, event loop, exit codes. 0: shut down by signal; 2: it
can never run as configured (one line on stderr says why); 1: anything else.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import sys
from typing import Final

import pydantic
import uvloop

import headrace_facts.plain_structlog  # noqa: F401  # before anything that imports structlog
from headrace_facts import pulse
from headrace_telemetry import logs, process
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.metrics import CannotListen

# Of glibc's <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_KEPT_BYTES: Final = 16 << 20
_MOST_KEPT_BYTES: Final = 32 << 20


def main(arguments: list[str] | None = None) -> int:
    """Runs until a signal stops it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="headrace_telemetry", description="Headrace's traces and metrics")
    parser.add_argument(
        "--config-json", required=True, metavar="FILE", help="TelemetryConfig as JSON; - reads standard input"
    )
    pulse.add_argument(parser)
    options = parser.parse_args(arguments)
    path: str = options.config_json
    try:
        text = sys.stdin.read() if path == "-" else pathlib.Path(path).read_text(encoding="utf-8")
        config = TelemetryConfig.model_validate_json(text)
        logs.configure(config.log_format, config.log_level)
        config.check_files()
        _keep_freed_memory()
        uvloop.run(_run(config, options.pulse_fd))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        return _refuse(f"configuration: {'.'.join(map(str, problem['loc']))}: {problem['msg']}")
    except (CannotListen, ValueError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or path}: {error.strerror}")
    return 0


async def _run(config: TelemetryConfig, pulse_fd: int | None) -> None:
    pulse.start(pulse_fd)
    await process.run(config)


def _keep_freed_memory() -> None:
    """Has glibc's allocator keep the memory of one batch for the next.

    Giving it back and touching fresh pages was a sixth of the process's time.

    Other C libraries have no such knob.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


def _refuse(why: str) -> int:
    print(f"headrace telemetry: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
