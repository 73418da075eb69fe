"""The best of each rank's part of the vocabulary give the best of all.

Ties and rows that are not finite are included.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_kernels.sampling.choice import best_candidates, choose_greedy_reference, most_likely_part

# Few values, so that most rows have ties; 0.1 and its neighbours differ in their last bit.
VALUES = st.sampled_from([-float("inf"), -2.5, 0.1, 0.10000000894069672, 3.0, float("inf"), float("nan")])


@given(
    world_size=st.integers(1, 5),
    part=st.integers(1, 4),
    rows=st.integers(1, 3),
    data=st.data(),
)
def test_candidates_choose_what_the_whole_would(world_size: int, part: int, rows: int, data: st.DataObject) -> None:
    size = world_size * part
    values = data.draw(st.lists(VALUES, min_size=rows * size, max_size=rows * size))
    logits = torch.tensor(values).view(rows, size)
    candidates = []
    for rank, own in enumerate(logits.split(part, dim=1)):
        tokens, peaks = most_likely_part(own.contiguous(), rank * part)
        candidates.append(torch.stack((peaks.double(), tokens.double()), dim=1))
    found, finite = best_candidates(torch.stack(candidates))
    expected, expected_finite = choose_greedy_reference(logits)
    assert finite.tolist() == expected_finite.tolist()
    assert found[finite].tolist() == expected[finite].tolist()
