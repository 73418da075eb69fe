"""A worker that deals the rows of every step out, however few they are.

    dealing_worker.py [--ends-in-deal RANK ROWS | --never-deals] WORKER'S ARGUMENTS

--ends-in-deal: that rank is killed when it is about to deal so many rows. --never-deals: every rank
draws all rows of every step.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch

from headrace_backend.parallel import row_dealer
from headrace_backend.parallel.row_dealer import RowDealer
from headrace_backend.worker.lifetime import end_process
from headrace_backend.worker.main import main


def end_in_deal(rank: int, num_rows: int) -> None:
    """Has a rank end in the middle of a step."""
    deal = RowDealer.deal

    def deal_or_end(dealer: RowDealer, part: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        if dealer._collectives.rank == rank and len(part) == num_rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return deal(dealer, part, room)

    RowDealer.deal = deal_or_end  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ends-in-deal", type=int, nargs=2)
    parser.add_argument("--never-deals", action="store_true")
    options, others = parser.parse_known_args()
    row_dealer._LEAST_SAVED_BYTES = 1
    if options.never_deals:
        RowDealer.pays = lambda dealer, num_rows: False  # type: ignore[method-assign]
    if options.ends_in_deal:
        end_in_deal(*options.ends_in_deal)
    sys.exit(end_process(main(others)))
