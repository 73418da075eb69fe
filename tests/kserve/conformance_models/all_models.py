"""The small models of Triton's example programs, as `--conformance-models` takes them.

A module with `models()`.
"""

from __future__ import annotations

from tests.kserve.conformance_models import arithmetic, sequences, timing
from tests.kserve.conformance_models.model import ConformanceModel


def models() -> list[ConformanceModel]:
    """Returns the models of one server; those that keep sequences begin without any."""
    return [*arithmetic.models(), *sequences.models(), *timing.models()]
