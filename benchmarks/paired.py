"""Two ways measured in turns: by how much one is more than the other, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

_RESAMPLES = 2000
_SHARE = 0.95


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The median of paired differences, and its interval by resampling (95%)."""
    values = np.asarray(differences)
    draws = np.random.default_rng(0).choice(values, (_RESAMPLES, values.size))
    low, high = np.quantile(np.median(draws, axis=1), ((1 - _SHARE) / 2, (1 + _SHARE) / 2))
    return statistics.median(differences), float(low), float(high)


def relative(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """By what share `values` are more than `others`, each than the other one of its pair.

    Returns the median, and the ends of its interval.
    """
    median, low, high = interval([value / other - 1 for value, other in zip(values, others, strict=True)])
    return {"median": round(median, 5), "low": round(low, 5), "high": round(high, 5)}
