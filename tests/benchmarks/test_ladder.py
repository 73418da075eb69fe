"""The ladder's gains, the attention that it compares with, and its places in the pages."""

from __future__ import annotations

import pytest
import torch
from benchmarks import plots
from benchmarks.ladder_rungs import Record
from benchmarks.placed_text import placed
from benchmarks.plain_attention import materialized_attention
from benchmarks.publish_ladder import details, table

_RECORD = {
    "gpu": "NVIDIA H200",
    "shape": "llama-3.1-8b",
    "dtype": "bf16",
    "date": "2026-11-24T01:00:00+00:00",
    "git": "abc",
    "shorter": 4,
    "rows": 32,
    "max_num_seqs": 512,
    "kv_waste": {
        "waste_paged": 0.011,
        "waste_contiguous_prompt_and_max_tokens": 0.17,
        "waste_contiguous_whole_context": 0.84,
    },
    "contexts": [{"context": 8192, "recompute_ms": 300.0, "kv_cache_ms": 15.0, "gain": 20.0}],
    "attention": [
        {"tokens": 2048, "materialized_ms": 1.5, "fused_ms": 0.2, "materialized_mib": 1300.0, "fused_mib": 16.0}
    ],
}


def _climbed() -> Record:
    record = Record()
    for name, rate in (("recompute", 20.0), ("kv_cache", 60.0), ("full", 6000.0), ("fp8", 9000.0), ("int4", 7000.0)):
        record.add({"rung": name, "output_tok_s": rate, "mfu": 0.1})
    record.add({"rung": "speculation", "on": "int4", "acceptance": 0.8, "single_tok_s": 900.0, "single_gain": 3.0})
    return record


def test_a_rung_gains_over_the_one_before_and_few_bits_over_full() -> None:
    gains = [(rung.get("gain"), rung.get("total_gain")) for rung in _climbed().rungs]
    assert gains == [(1.0, 1.0), (3.0, 3.0), (100.0, 300.0), (1.5, 450.0), (1.17, 350.0), (None, None)]


def test_materialized_attention_is_causal_attention_of_groups() -> None:
    query, key, value = (torch.randn(heads, 7, 4) for heads in (6, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(materialized_attention(query, key, value), expected)


def test_a_record_becomes_a_table_and_sentences_and_a_picture() -> None:
    record = _RECORD | {"rungs": _climbed().rungs}
    rows = table(record).splitlines()
    assert "| the default rows, 512 | 6,000 | 100 x | 300 x |  | 10.0% |" in rows
    assert "| speculation on int4, 80% of drafts right: 3 times |  |  |  | 900 |  |" in rows
    assert max(len(line) for line in details(record).splitlines()) <= 100
    assert "8,192: 20" in details(record).replace("\n", " ")
    assert len(plots.ladder(record).axes) == 2


def test_text_goes_between_the_marks_alone() -> None:
    page = "before\n<!-- figures: ladder -->\nold\n<!-- /figures -->\nafter\n<!-- /figures -->\n"
    assert placed(page, "ladder", "new \\1\n") == page.replace("old", "new \\1")
    with pytest.raises(ValueError, match="figures: ladder"):
        placed("nothing here", "ladder", "new")
