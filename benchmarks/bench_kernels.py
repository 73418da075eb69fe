"""Each kernel's time inside a CUDA graph, beside the ceiling of this run.

The ceiling is bytes over copy bandwidth or operations over the matrix rate, whichever takes longer.

The cases are in `benchmarks/kernel_cases`, the timing is in `kernel_timing`; each file of cases
runs in a process of its own. Without a GPU the cases are only listed.

    python -m benchmarks.bench_kernels --only attention,sampling --json FILE
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import figures
from benchmarks.ceilings import Ceilings, measured

_CASES = pathlib.Path(__file__).parent / "kernel_cases"


def case_files() -> list[str]:
    """Names of the files of cases."""
    return sorted(path.stem for path in _CASES.glob("*.py") if path.stem != "__init__")


def results(file: str, match: str, only_list: bool) -> Iterator[dict[str, Any]]:
    """The cases of a file as they are timed; a last one with an error if its process broke."""
    command = [sys.executable, "-m", "benchmarks.kernel_timing", file, "--match", match]
    command += ["--list"] if only_list else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=figures.environment(), text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield {"file": file, **json.loads(line)}
    if process.wait():
        yield {"file": file, "case": "", "error": f"the process ended with exit code {process.returncode}"}


def with_ceiling(result: dict[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """The result with the time that the ceilings allow and the share of it that was reached."""
    if "us" not in result:
        return result
    memory_us = result["bytes"] / ceilings.copy_bytes_s * 1e6
    compute_us = result["flops"] / ceilings.best_flop_s * 1e6
    floor_us = max(memory_us, compute_us)
    bound = "memory" if memory_us >= compute_us else "compute"
    return {**result, "floor_us": round(floor_us, 3), "bound": bound, "of_ceiling": round(floor_us / result["us"], 4)}


def line(result: dict[str, Any]) -> str:
    """One case for people."""
    name = f"{result['file']}.{result['case']}"
    if "us" not in result:
        return f"{name:<62} {result.get('error', '')}"
    rates = f"{result['us']:>10.2f} us {result['tb_s']:>7.3f} TB/s {result['tflop_s']:>8.1f} TFLOP/s"
    return f"{name:<62}{rates} {result['of_ceiling']:>7.1%} of {result['bound']}"


def main() -> int:
    """Command line; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"files of cases, with commas: {', '.join(case_files())}")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--git", default="", help="the commit, where the tree has no history")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    files = options.only.split(",") if options.only else case_files()
    if unknown := sorted(set(files) - set(case_files())):
        parser.error(f"no cases {unknown[0]!r}; there are {', '.join(case_files())}")
    ceilings = measured()
    on_gpu = ceilings.device == "cuda"
    print(f"{ceilings.name}: {ceilings.summary()}" if on_gpu else "no GPU: cases are listed, not timed", flush=True)
    timed = []
    for file in files:
        for result in results(file, options.match, only_list=not on_gpu):
            timed.append(with_ceiling(result, ceilings))
            print(line(timed[-1]), flush=True)
    record = {"name": "kernels", "gpu": ceilings.name if on_gpu else "", "ceilings": ceilings.summary()}
    figures.write_json({**record, **figures.provenance(options.git), "cases": timed}, options.json)
    return int(any("error" in result for result in timed))


if __name__ == "__main__":
    sys.exit(main())
