"""A histogram that takes many values at once, because an SDK's takes microseconds for each.

Owns counts, sum and extremes of one series; hands them out as the SDK's own data point, so that whoever exports sees no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from opentelemetry.sdk.metrics.export import HistogramDataPoint


class BatchHistogram:
    """Cumulative counts of values by explicit bounds, each the inclusive end of its bucket.

    Args:
        bounds: strictly increasing.
        start_unix_ns: when counting began.
    """

    def __init__(self, bounds: Sequence[float], start_unix_ns: int) -> None:
        self._bounds = np.asarray(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._smallest, self._largest = float("inf"), float("-inf")
        self._start_unix_ns = start_unix_ns

    def observe(self, values: npt.NDArray[np.number]) -> None:
        """Counts `values` [num_values]."""
        if not len(values):
            return
        # A bound belongs to the bucket below it, as in OpenTelemetry and Prometheus.
        places = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(values.sum())
        self._smallest = min(self._smallest, float(values.min()))
        self._largest = max(self._largest, float(values.max()))

    def point(self, attributes: Mapping[str, str], now_unix_ns: int) -> HistogramDataPoint:
        """The data point as it stands."""
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=self._start_unix_ns,
            time_unix_nano=now_unix_ns,
            count=int(self._counts.sum()),
            sum=self._sum,
            bucket_counts=self._counts.tolist(),
            explicit_bounds=self._bounds.tolist(),
            min=self._smallest,
            max=self._largest,
            exemplars=[],
        )
