"""Every field of a served family's configuration in transformers is read, or refused by name.

What changes nothing is listed here with the reason. A field that a newer transformers adds fails
this test until it is read, refused or listed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.models.checkpoints import CONFIGS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace_model_folder import InvalidModelFolder
from headrace_model_folder.config import ModelConfig, parse_config
from headrace_model_folder.families.foreign_fields import _FOREIGN
from headrace_model_folder.families.registry import FAMILIES

# Training alone: noise, starting values, losses.
_OF_TRAINING = frozenset(
    ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "initializer_range")
    + ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
)
# How transformers computes, and what it returns.
_OF_TRANSFORMERS = frozenset(
    ("use_cache", "pretraining_tp", "model_type", "transformers_version", "output_attentions", "output_hidden_states")
    + ("return_dict", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "_name_or_path")
)
# Its row of the embedding is one as others in a folder.
_OF_BATCHES = frozenset(("pad_token_id",))
# transformers' own record of what `layer_types` says.
_SAID_TWICE = frozenset(("_sliding_window_pattern",))
# What transformers makes of other fields, and writes beside them.
_DERIVED = frozenset(("layer_types", "no_rope_layers"))
_WITHOUT_EFFECT = _OF_TRAINING | _OF_TRANSFORMERS | _OF_BATCHES | _SAID_TWICE
# No field of any family takes this.
_JUNK: dict[str, Any] = {"junk": {"junk": []}}


@functools.cache
def stated(name: str) -> Mapping[str, Any]:
    """config.json of a model of CONFIGS, its text part alone."""
    config = CONFIGS[name]().get_text_config()
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**values, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)]}


def forms(name: str) -> list[Mapping[str, Any]]:
    """config.json as transformers writes it, and without what follows from the rest."""
    whole = stated(name)
    return [whole, {field: value for field, value in whole.items() if field not in _DERIVED}]


@functools.cache
def names_of(architecture: str) -> tuple[str, ...]:
    return tuple(name for name in CONFIGS if stated(name)["architectures"] == [architecture])


def result(values: Mapping[str, Any]) -> ModelConfig | None:
    try:
        return parse_config(dict(values))
    except InvalidModelFolder:
        return None


ALONE = [name for name, family in FAMILIES.items() if family.text_part is None]


@pytest.mark.parametrize("architecture", ALONE)
def test_every_field_of_transformers_is_read_or_refused(architecture: str) -> None:
    configs = [config for name in names_of(architecture) for config in forms(name)]
    # Not every model is one without what follows from the rest: layers would be of other kinds.
    found = [(config, before) for config in configs if (before := result(config)) is not None]
    assert len(found) >= len(configs) // 2
    unread = {
        field
        for field in set().union(*configs) - _WITHOUT_EFFECT
        if all(result({**config, field: _JUNK}) == before for config, before in found)
    }
    assert not unread


@pytest.mark.parametrize("architecture", ALONE)
def test_what_other_families_compute_is_refused_by_name(architecture: str) -> None:
    config = stated(names_of(architecture)[0])
    for field in set(_FOREIGN) - FAMILIES[architecture].knows:
        with pytest.raises(InvalidModelFolder, match=f"{field} must be absent: {architecture} computes nothing by it"):
            parse_config({**config, field: 7.5})


def test_only_fields_of_the_table_are_known() -> None:
    assert all(family.knows <= set(_FOREIGN) for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logits_scaling", 1.0),
        ("sliding_window", None),
        ("layer_types", ["full_attention"] * 3),
        ("no_rope_layers", [1, 1, 1]),
        ("mlp_bias", False),
        ("position_embedding_type", "rope"),
        ("norm_topk_prob", True),
    ],
)
def test_a_value_that_changes_nothing_is_no_reason_to_refuse(field: str, value: Any) -> None:
    config = dict(stated("mixtral"))
    assert parse_config({**config, field: value}) == parse_config(config)
