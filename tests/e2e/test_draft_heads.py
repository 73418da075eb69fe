"""A model with a head that drafts: settings that make no pair are refused.

What a server with one answers is in test_speculation_matrix.py.
"""

from __future__ import annotations

import pathlib

from tests.support.eagle_heads import write_random_head
from tests.support.running_server import DEMO, refused


def test_settings_that_make_no_pair_are_refused(tmp_path: pathlib.Path) -> None:
    head = write_random_head(tmp_path / "head", DEMO)

    def said(*options: str) -> str:
        ended, _ = refused(*options)
        assert ended.returncode == 2
        return str(ended.stderr)

    assert "no draft_model is named: the folder of the model's EAGLE-3 head" in said("--speculate", "eagle")
    assert "draft_quantize is int8, and speculate is eagle" in said(
        "--speculate", "eagle", "--draft-model", str(head), "--draft-quantize", "int8"
    )
    assert "that are served (nearest: LlamaForCausalLM," in said("--speculate", "draft", "--draft-model", str(head))
    of_a_model = said("--speculate", "eagle", "--draft-model", str(DEMO / "draft"))
    assert "architectures of an EAGLE-3 head name one of LlamaForCausalLMEagle3" in of_a_model
    assert "found 'LlamaForCausalLM'" in of_a_model
    assert "the model (LlamaForCausalLM) has no MTP layer to draft with" in said("--speculate", "mtp")
    assert "draft_model is" in said("--speculate", "mtp", "--draft-model", str(head))
    assert "no such folder" in said("--speculate", "eagle", "--draft-model", str(tmp_path / "nowhere"))
