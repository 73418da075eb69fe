"""The process of `headrace quantize`: a configuration in, a folder and a table out.

Owns exit codes: 0 done, 1 failed on the way (the run can go on with --resume), 2 refused. What is
refused or failed is one line.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from headrace_model_folder import InvalidModelFolder
from headrace_quantize.checks import QuantizeRefused, check
from headrace_quantize.config import QuantizeConfig
from headrace_quantize.progress import RunProgress
from headrace_quantize.report import print_report
from headrace_quantize.run import Run


def main(arguments: list[str]) -> int:
    """Runs one request. Arguments are those of the process."""
    parser = argparse.ArgumentParser(prog="headrace quantize")
    parser.add_argument("--config-json", type=pathlib.Path, required=True)
    file = parser.parse_args(arguments).config_json
    config = QuantizeConfig.model_validate_json(file.read_text(encoding="utf-8"))
    try:
        return _quantize(config)
    except (QuantizeRefused, InvalidModelFolder) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"headrace: OUT_FOLDER {config.out_folder}: {error.strerror}; --resume goes on", file=sys.stderr)
        return 1


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
