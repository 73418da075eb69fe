"""From arrival times to figures: TTFT, ITL, TPOT, end to end, rates and goodput.

They are made alike for every way of sending a workload and for the roofline's synthetic run.

Times in are seconds, figures are milliseconds and tokens per second. Percentiles are nearest ranks.
Tokens that arrive in one message arrive at once: their inter-token latency is 0.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# What counts as a good answer here: first token and mean time per token after it.
GOOD_TTFT_S = 0.5
GOOD_TPOT_S = 0.05
_DIGITS = 3

Seconds = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request as its caller saw it."""

    # When it was to be sent; an open loop counts from there, even if the sender was late.
    start_s: float
    prompt_tokens: int
    # [output tokens] ascending.
    arrivals_s: Seconds

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return float(self.arrivals_s[0]) - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        count = len(self.arrivals_s) - 1
        return float(self.arrivals_s[-1] - self.arrivals_s[0]) / count if count else None

    @property
    def e2e_s(self) -> float:
        """To the last token."""
        return float(self.arrivals_s[-1]) - self.start_s

    @property
    def good(self) -> bool:
        """Whether it met both limits of goodput."""
        tpot = self.tpot_s
        return self.ttft_s <= GOOD_TTFT_S and (tpot is None or tpot <= GOOD_TPOT_S)


def rank(values: Seconds, share: float) -> float | None:
    """The nearest-rank percentile in milliseconds; None for none."""
    if not values.size:
        return None
    ordered = np.sort(values)
    return round(float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) * 1e3, _DIGITS)


def gaps_s(requests: Sequence[Request]) -> Seconds:
    """All inter-token latencies."""
    return np.concatenate([np.diff(request.arrivals_s) for request in requests] or [np.empty(0)])


def summary(requests: Sequence[Request], begin_s: float, unanswered: int = 0) -> dict[str, Any]:
    """The figures of a run that began at `begin_s` and ended with its last token.

    Requests that were given up are in no percentile, and none of them was a good answer.
    """
    wall_s = max(float(request.arrivals_s[-1]) for request in requests) - begin_s
    ttft = np.asarray([request.ttft_s for request in requests])
    e2e = np.asarray([request.e2e_s for request in requests])
    tpot = np.asarray([request.tpot_s for request in requests if request.tpot_s is not None])
    itl = gaps_s(requests)
    return {
        "requests": len(requests),
        "wall_s": round(wall_s, 4),
        "output_tok_s": round(sum(len(request.arrivals_s) for request in requests) / wall_s, 1),
        "input_tok_s": round(sum(request.prompt_tokens for request in requests) / wall_s, 1),
        "ttft_p50": rank(ttft, 0.5),
        "ttft_p95": rank(ttft, 0.95),
        "itl_p50": rank(itl, 0.5),
        "itl_p99": rank(itl, 0.99),
        "tpot_p50": rank(tpot, 0.5),
        "e2e_p50": rank(e2e, 0.5),
        "e2e_p95": rank(e2e, 0.95),
        "e2e_p99": rank(e2e, 0.99),
        "goodput": round(sum(request.good for request in requests) / (len(requests) + unanswered), 4),
    }


def itl_over_time(requests: Sequence[Request], begin_s: float, bins: int = 60) -> list[list[float | None]]:
    """Inter-token latencies over the run, [bins with tokens, 3].

    The columns are the time of a stretch's middle (s), and the p50 and p99 of the inter-token
    latencies (ms) that ended in it.
    """
    ends = np.concatenate([request.arrivals_s[1:] for request in requests] or [np.empty(0)]) - begin_s
    gaps = gaps_s(requests)
    if not gaps.size:
        return []
    width = float(ends.max()) / bins or 1.0
    places = np.minimum((ends / width).astype(int), bins - 1)
    rows = [(place, gaps[places == place]) for place in np.unique(places).tolist()]
    return [[round((place + 0.5) * width, 3), rank(part, 0.5), rank(part, 0.99)] for place, part in rows]


def medians(runs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Field by field the median of several runs' summaries.

    Each figure that differs has its least and its largest too.
    """
    middle, spread = dict(runs[0]), {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        if len(set(values)) > 1:
            middle[name] = statistics.median(values)
            spread[name] = [min(values), max(values)]
    return middle, spread
