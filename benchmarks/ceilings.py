"""What the device can do at most: copy bandwidth and matrix rates, measured in each run.

Owns the record and the process that measures it (`measure_ceilings`): apart, so that a benchmark's
own process imports no torch, has no CUDA context, and the memory is free again.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

from benchmarks import figures


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """The device and its rates."""

    # "cuda" or "cpu".
    device: str
    # The device's own name.
    name: str
    # Bytes read and written per second.
    copy_bytes_s: float
    # Multiplications and additions per second of the plain types, by the rows of the product.
    gemm_flop_s: dict[int, float]
    # The same of FP8 by FP8; empty on devices without such products.
    fp8_gemm_flop_s: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def best_flop_s(self) -> float:
        """The highest matrix rate of the plain types."""
        return max(self.gemm_flop_s.values())

    @property
    def best_8_bit_flop_s(self) -> float:
        """The highest matrix rate where both sides have 8 bits.

        That of the plain types where no such product was measured.
        """
        return max(self.fp8_gemm_flop_s.values(), default=self.best_flop_s)

    def summary(self) -> dict[str, Any]:
        """The ceilings in words for results: TB/s and TFLOP/s."""
        rates = {
            f"{name}_m{rows}_tflop_s": round(rate / 1e12, 4)
            for name, by_rows in (("gemm", self.gemm_flop_s), ("fp8_gemm", self.fp8_gemm_flop_s))
            for rows, rate in by_rows.items()
        }
        return {"copy_tb_s": round(self.copy_bytes_s / 1e12, 4), **rates}


def measured(device: str = "auto", threads: int = 0) -> Ceilings:
    """Measures in a process of its own.

    Args:
        device: auto, cpu or cuda[:index].
        threads: Threads of a CPU's measurement; 0: torch's own number.

    Raises:
        RuntimeError: The measurement failed; the message is its last words.
    """
    command = [sys.executable, "-m", "benchmarks.measure_ceilings", "--device", device, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=figures.environment())
    if done.returncode:
        raise RuntimeError(f"the ceilings could not be measured: {done.stderr.strip()[-500:]}")
    values = json.loads(done.stdout.splitlines()[-1])
    plain, fp8 = (
        {int(rows): rate for rows, rate in values[name].items()} for name in ("gemm_flop_s", "fp8_gemm_flop_s")
    )
    return Ceilings(values["device"], values["name"] or figures.cpu_name(), values["copy_bytes_s"], plain, fp8)
