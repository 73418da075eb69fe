"""Qwen3.5 with the layer that predicts the token after the next, and what that layer predicts.

transformers leaves that layer out. A folder is written from its model, with random tensors of a
layer beside the others; the oracle computes them with transformers' own layer and norms.
"""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.worker.step.test_cache_groups import Made
from torch import Tensor, nn

from headrace_backend.models.build import ModelBuild
from headrace_backend.models.load import load_model
from headrace_backend.models.mtp_head import MtpBuild, MtpHead
from headrace_backend.weights.placement import ALONE
from headrace_backend.weights.scheme import Schemes
from headrace_model_folder import ModelFolder, open_mtp


class HybridWithMtp(Made):
    """A model whose last layer has attention, and the layer beside it."""

    def __init__(self, path: pathlib.Path, config: Any, agrees: bool = False) -> None:
        """Writes and reads the folder; with `agrees` both predict the same from a token alone."""
        super().__init__(path, config)
        last = config.num_hidden_layers - 1
        assert config.layer_types[last] == "full_attention"
        torch.manual_seed(5)
        self._own = self._layer_like(last)
        size = config.hidden_size
        self._norms = {name: self._norm(size) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        self._fc = 0.3 * torch.randn(size, 2 * size)
        if agrees:
            self._agree(size)
            self.theirs.save_pretrained(path)
        tensors = {f"mtp.layers.0.{name}": tensor for name, tensor in self._own.state_dict().items()}
        tensors |= {f"mtp.{name}.weight": norm.weight.data for name, norm in self._norms.items()}
        tensors["mtp.fc.weight"] = self._fc
        whole = load_file(path / "model.safetensors") | {name: each.clone() for name, each in tensors.items()}
        save_file(whole, path / "model.safetensors", {"format": "pt"})
        stated = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(stated | {"mtp_num_hidden_layers": 1}))
        self.path = path
        self.ours, self.head = self.pair()

    def pair(self, path: pathlib.Path | None = None) -> tuple[Any, MtpHead]:
        """The model read anew, or from another path, and its layer, which is joined to it."""
        folder, where = ModelFolder.open(path or self.path), torch.device("cpu")
        layer = open_mtp(folder)

        def build(opened: ModelFolder) -> ModelBuild:
            return ModelBuild(opened.config, torch.float32, where, Schemes(), ALONE, opened.tensors, 256)

        target = load_model(build(folder), folder, lambda *_: None)
        return target, MtpBuild(build(layer), 256).loaded(layer, target, lambda *_: None, 0)

    def _layer_like(self, index: int) -> nn.Module:
        layer = copy.deepcopy(self.theirs.model.layers[index])
        layer.self_attn.layer_idx = 0
        for name, parameter in layer.named_parameters():
            nn.init.normal_(parameter, 0.0, 0.2 if "norm" in name else 0.3)
        return layer

    def _norm(self, size: int) -> nn.Module:
        norm = copy.deepcopy(self.theirs.model.norm)
        nn.init.normal_(norm.weight, 0.0, 0.2)
        return norm

    def _agree(self, size: int) -> None:
        """Layers add next to nothing to the stream, and the layer looks at the embedding alone."""
        for module in (self.theirs.model.layers, self._own):
            for name, parameter in module.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    parameter.data.mul_(1e-4)
        self._norms["pre_fc_norm_embedding"].weight.data.zero_()
        self._norms["norm"].weight.data.copy_(self.theirs.model.norm.weight.data)
        self._fc = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest `count` tokens behind a sequence whose last token is not computed yet."""
        states = self.theirs.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        behind, found = list(tokens[1:]), list[int]()
        for _ in range(count):
            own = self._states(torch.tensor(behind), states)
            found.append(int(self.theirs.lm_head(own[-1]).argmax()))
            behind, states = [*behind, found[-1]], torch.cat((states, own[-1:]))
        return found

    def _states(self, tokens: Tensor, states: Tensor) -> Tensor:
        """The layer's own states of tokens 1 to n, each behind the state of the one before it."""
        embedded = self._norms["pre_fc_norm_embedding"](self.theirs.model.embed_tokens(tokens))
        stream = (torch.cat((embedded, self._norms["pre_fc_norm_hidden"](states)), dim=-1) @ self._fc.T)[None]
        positions = torch.arange(1, 1 + len(tokens))[None]
        config = self.theirs.config
        # The first token has no state before it: its key and value are zeros.
        cache = transformers.DynamicCache()
        nothing = torch.zeros(1, config.num_key_value_heads, 1, config.head_dim)
        cache.update(nothing, nothing.clone(), 0)
        out = self._own(
            stream,
            position_embeddings=self.theirs.model.rotary_emb(stream, positions),
            attention_mask=torch.ones(len(tokens), 1 + len(tokens)).tril(1).log()[None, None],
            position_ids=positions,
            past_key_values=cache,
        )
        hidden = out if isinstance(out, Tensor) else out[0]
        return self._norms["norm"](hidden[0] if hidden.dim() == 3 else hidden)
