"""A worker that cuts every step of several tokens into two pieces with pending all-reduces.

    cutting_worker.py [--ends-in-sum RANK ROWS] WORKER'S ARGUMENTS

--ends-in-sum: that rank is killed when it has begun its first sum of so many rows.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from torch import Tensor

from headrace_backend.parallel import nccl
from headrace_backend.parallel.collectives import PendingAllReduce, PieceRule
from headrace_backend.parallel.gloo import GlooCollectives
from headrace_backend.worker.lifetime import end_process
from headrace_backend.worker.main import main

# Of a prompt of 30 tokens.
MULTIPLE = 16


def end_in_sum(rank: int, num_rows: int) -> None:
    """Has a rank of the CPU end in the middle."""
    begin = GlooCollectives.begin_all_reduce

    def begin_and_end(collectives: GlooCollectives, partial: Tensor) -> PendingAllReduce:
        pending = begin(collectives, partial)
        if collectives.rank == rank and len(partial) == num_rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return pending

    GlooCollectives.begin_all_reduce = begin_and_end  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ends-in-sum", type=int, nargs=2)
    options, others = parser.parse_known_args()
    rule = PieceRule(1, 1, MULTIPLE)
    GlooCollectives.piece_rule = rule
    nccl.piece_rule = lambda world_size: rule
    if options.ends_in_sum:
        end_in_sum(*options.ends_in_sum)
    sys.exit(end_process(main(others)))
