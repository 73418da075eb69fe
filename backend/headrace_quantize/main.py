"""The process of `headrace quantize`: a configuration in, a folder and a table out.

Owns exit codes: 0 done, 1 failed on the way (the run can go on with --resume), 2 refused, 130
interrupted (Ctrl-C; the run can go on with --resume). What is refused or failed is one line.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from headrace_model_folder import InvalidModelFolder
from headrace_quantize.checks import STATE_FILE, QuantizeRefused, check
from headrace_quantize.config import QuantizeConfig
from headrace_quantize.progress import RunProgress
from headrace_quantize.report import print_report
from headrace_quantize.run import Run

_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Runs one request. Arguments are those of the process."""
    parser = argparse.ArgumentParser(prog="headrace quantize")
    parser.add_argument("--config-json", type=pathlib.Path, required=True)
    file = parser.parse_args(arguments).config_json
    config = QuantizeConfig.model_validate_json(file.read_text(encoding="utf-8"))
    try:
        return _quantize(config)
    except KeyboardInterrupt:
        print(f"headrace: interrupted; {_left(config)}", file=sys.stderr)
        return _INTERRUPTED
    except (QuantizeRefused, InvalidModelFolder) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"headrace: OUT_FOLDER {config.out_folder}: {error.strerror}; --resume goes on", file=sys.stderr)
        return 1


def _left(config: QuantizeConfig) -> str:
    """What an interrupted run leaves, and how to go on."""
    if not (pathlib.Path(config.out_folder) / STATE_FILE).exists():
        return "nothing was written"
    return f"OUT_FOLDER {config.out_folder} keeps the layers that are finished, the same command with --resume goes on"


def _quantize(config: QuantizeConfig) -> int:
    job = check(config)
    progress = RunProgress(len(job.model.config.description.layers))
    run = Run(job, progress)
    if run.out.is_finished:
        progress.note(f"{config.out_folder} is finished")
        return 0
    with progress:
        report = run.quantize()
    print_report(report)
    return 0
