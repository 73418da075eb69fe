"""What config.json of a dense family says of its layers, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from tests.model_folder.folders import CONFIG

from headrace_model_folder import InvalidModelFolder
from headrace_model_folder.config import parse_config
from headrace_model_folder.description import ModelDescription


def describe(architecture: str, **changes: Any) -> ModelDescription:
    return parse_config({**CONFIG, "architectures": [architecture], "num_hidden_layers": 4, **changes}).description


def rope_types(model: ModelDescription) -> list[str]:
    return [layer.attention.rope.rope_type for layer in model.layers]


def windows(model: ModelDescription) -> list[int | None]:
    return [layer.attention.window for layer in model.layers]


def test_smollm3_rotates_where_its_list_or_interval_says() -> None:
    by_default = describe("SmolLM3ForCausalLM")
    assert rope_types(by_default) == ["default", "default", "default", "none"]
    assert by_default.rope.theta == 2_000_000.0 and by_default.head.tied
    assert rope_types(describe("SmolLM3ForCausalLM", no_rope_layer_interval=2)) == ["default", "none"] * 2
    # A list may have entries for more layers than the model has.
    listed = describe("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 0, 1], rope_theta=5e6)
    assert rope_types(listed) == ["none", "default", "default", "none"]
    assert (listed.rope.theta, len(listed.rotations)) == (5e6, 2)


def test_smollm3_has_windows_only_where_it_is_told_to() -> None:
    window = {"sliding_window": 8, "no_rope_layers": [1, 0, 1, 0]}
    assert windows(describe("SmolLM3ForCausalLM", **window)) == [None] * 4
    assert windows(describe("SmolLM3ForCausalLM", **window, use_sliding_window=True)) == [None, 8, None, 8]
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    stated = describe("SmolLM3ForCausalLM", **window, use_sliding_window=True, layer_types=types)
    assert windows(stated) == [8, None, None, None]


@pytest.mark.parametrize(
    ("architecture", "changes", "field"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": "1010"}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("SmolLM3ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ],
)
def test_what_a_family_cannot_do_is_refused_by_name(architecture: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidModelFolder, match=field):
        describe(architecture, **changes)
