"""Experts that a folder keeps in one tensor, as Qwen3.5 is published: the same model."""

from __future__ import annotations

import pathlib
import shutil

import safetensors.torch
import torch
from tests.models.checkpoints import load, write_pair

from headrace_model_folder import ModelFolder


def test_a_folder_of_joined_experts_has_the_same_weights(tmp_path: pathlib.Path) -> None:
    pair = write_pair(tmp_path / "apart", "qwen3.5-moe")
    shutil.copytree(pair.path, tmp_path / "joined")
    tensors = safetensors.torch.load_file(pair.path / "model.safetensors")
    (experts,) = {layer.router.outputs for layer in ModelFolder.open(pair.path).config.description.expert_layers}
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in range(experts)]
            for part in ("gate", "up", "down")
        )
        tensors[f"{name}.gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(ups)), dim=1)
        tensors[f"{name}.down_proj"] = torch.stack(downs)
    safetensors.torch.save_file(tensors, tmp_path / "joined" / "model.safetensors", metadata={"format": "pt"})
    joined = load(tmp_path / "joined")
    found, expected = dict(joined.named_parameters()), dict(pair.ours.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
