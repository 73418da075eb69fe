"""The telemetry process: `python -m headrace_telemetry --config-json FILE` (or `-` for stdin).

Owns the process's entry: configuration, logs, event loop, exit codes. 0: shut down by signal; 2: it can never run as configured (one line on stderr says why); 1: anything else.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import pydantic
import uvloop

from headrace_telemetry import logs, process
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.metrics import CannotListen


def main(arguments: list[str] | None = None) -> int:
    """Runs until told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="headrace_telemetry", description="Headrace's traces and metrics")
    parser.add_argument(
        "--config-json", required=True, metavar="FILE", help="TelemetryConfig as JSON; - reads standard input"
    )
    path: str = parser.parse_args(arguments).config_json
    try:
        text = sys.stdin.read() if path == "-" else pathlib.Path(path).read_text(encoding="utf-8")
        config = TelemetryConfig.model_validate_json(text)
        logs.configure(config.log_format, config.log_level)
        config.check_files()
        uvloop.run(process.run(config))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        return _refuse(f"configuration: {'.'.join(map(str, problem['loc']))}: {problem['msg']}")
    except (CannotListen, ValueError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or path}: {error.strerror}")
    return 0


def _refuse(why: str) -> int:
    print(f"headrace telemetry: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
