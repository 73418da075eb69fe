"""The ladder's rungs of few bits are named by what the engine is configured with.

Any other name is refused before anything is measured.
"""

from __future__ import annotations

import pytest
from benchmarks.bench_ladder import low_bit_rungs
from tests.support.running_server import DEMO

from headrace_backend.config import EngineConfig


def test_names_are_the_engines_settings() -> None:
    rungs = low_bit_rungs("int4,nf4,head-fp8,fp8+head-int8,int4+head-int8", 64)
    assert rungs == {
        "int4": {"quantize": "int4", "quantize_group": 64},
        "nf4": {"quantize": "nf4"},
        "head-fp8": {"quantize_head": "fp8"},
        "fp8+head-int8": {"quantize": "fp8", "quantize_head": "int8"},
        "int4+head-int8": {"quantize": "int4", "quantize_head": "int8", "quantize_group": 64},
    }
    for settings in rungs.values():
        config = EngineConfig.model_validate({"model": DEMO, **settings}).model_dump()
        assert settings.items() <= config.items()
    assert low_bit_rungs("", 128) == {}


@pytest.mark.parametrize(
    "name", ["int5", "head-int4", "int4+fp8", "head-int8+head-fp8", "int4+", "+", "int4+nf4+head-int8"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is none of int8, int4, fp8, nf4, head-int8, head-fp8, or one of the layers"):
        low_bit_rungs(f"int8,{name}", 128)
