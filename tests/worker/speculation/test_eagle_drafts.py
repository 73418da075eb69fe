"""An EAGLE-3 head beside its target: it drafts what plain torch says, and changes no answer.

On a CPU, and by the GPU's kernels in the interpreter. The target's streams are those that
transformers computes of the same folder.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.eagle_heads import PlainHead, Tensors, head_config, random_head, write_head
from tests.support.kernel_case import DEVICES
from tests.worker.conftest import load, write
from tests.worker.driver import MAX_MODEL_LEN
from tests.worker.speculation import head_drafting
from tests.worker.speculation.drafted_rows import plain_answers, run
from tests.worker.speculation.head_drafting import assert_as_oracle, cpu_runner
from tests.worker.speculation.test_cpu_verification import OPTIONS, job
from tests.worker.speculation.test_cpu_verification import runner as plain_runner

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.eagle_head import EagleHead, HeadBuild
from headrace_kernels.triton_runtime import INTERPRETED
from headrace_model_folder import Eagle3Folder

LAYERS = (0, 1, 1)
DRAFT_VOCAB = 40


@pytest.fixture(scope="session")
def target(llama_path: pathlib.Path) -> CausalLM:
    """A model of its own, because a head has it leave streams."""
    return load(llama_path, "cpu")


@pytest.fixture(scope="session")
def config(llama_path: pathlib.Path) -> dict[str, Any]:
    return head_config(json.loads((llama_path / "config.json").read_text()), DRAFT_VOCAB, LAYERS)


@pytest.fixture(scope="session")
def tensors(config: dict[str, Any]) -> Tensors:
    return random_head(config)


def head_of(folder: pathlib.Path, target: CausalLM) -> EagleHead:
    where = next(target.parameters()).device
    build = HeadBuild(Eagle3Folder.open(folder), torch.float32, where, MAX_MODEL_LEN, target.num_layers, 256)
    return build.loaded(True, target, lambda *_: None, 0)


@pytest.fixture(scope="session")
def head(
    target: CausalLM, config: dict[str, Any], tensors: Tensors, tmp_path_factory: pytest.TempPathFactory
) -> EagleHead:
    return head_of(write_head(tmp_path_factory.mktemp("heads") / "random", config, tensors), target)


class Oracle:
    """What a head should draft, from the streams of the same model by transformers."""

    def __init__(self, target: pathlib.Path, config: dict[str, Any], tensors: Tensors) -> None:
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained(target).eval()
        self.head = PlainHead(config, tensors, self.model.model.embed_tokens.weight.detach())
        self._layers = config["eagle_aux_hidden_state_layer_ids"]

    @torch.no_grad()
    def streams(self, tokens: list[int]) -> torch.Tensor:
        hidden = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[layer][0] for layer in self._layers], dim=-1)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        return self.head.drafts(tokens, self.streams(tokens[:-1]), count)


@pytest.fixture(scope="session")
def oracle(llama_path: pathlib.Path, config: dict[str, Any], tensors: Tensors) -> Oracle:
    return Oracle(llama_path, config, tensors)


def test_a_head_drafts_what_plain_torch_says(target: CausalLM, head: EagleHead, oracle: Oracle) -> None:
    head_drafting.assert_drafts_are_the_oracles((target, head), oracle)


class Layout(NamedTuple):
    """A folder as somebody publishes it."""

    # Fields of the head beside those of a Llama, as its mathematics have them.
    fields: dict[str, Any]
    # From those to config.json.
    written: Callable[[dict[str, Any]], dict[str, Any]] = dict
    # Beginnings of names, and what stands there in the folder.
    names: tuple[tuple[str, str], ...] = ()
    # Layers of the target whose entering streams it fuses.
    layers: tuple[int, ...] = (1, 0, 1)
    # Whether the folder has an embedding of its own, and an output layer.
    has_embedding: bool = False
    has_output_layer: bool = True


def as_specforge(config: dict[str, Any]) -> dict[str, Any]:
    """Layers are counted by the streams that leave them, in `eagle_config`."""
    layers = [layer - 1 for layer in config.pop("eagle_aux_hidden_state_layer_ids")]
    nested = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    return config | {"eagle_config": nested, "layer_types": ["full_attention"] * 36, "sliding_window": 7}


def as_modelopt(config: dict[str, Any]) -> dict[str, Any]:
    """Switches stand in `eagle_config`, and the list of layers there is empty."""
    config |= {"sliding_window": None, "use_sliding_window": False}
    nested = {name: config.pop(name) for name in ("norm_before_fc", "norm_output")}
    flags = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    return config | {"eagle_config": flags | nested | {"eagle_aux_hidden_state_layer_ids": []}}


def as_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """The layer's fields are in an object of their own."""
    own = {
        name: config.pop(name)
        for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    }
    switches = {name: config.pop(name) for name in ("norm_before_fc", "norm_output", "fc_norm") if name in config}
    config.pop("architectures")
    about = {"speculators_model_type": "eagle3", "speculators_config": {"algorithm": "eagle3"}, "auto_map": {"": "x.Y"}}
    inner = config | {"rope_scaling": None, "pretraining_tp": 1, "use_cache": True}
    return own | switches | about | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": inner}


def as_later_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """A layer more is named, whose output the head was trained on."""
    config["layer_types"] = ["sliding_attention"]
    written = as_speculators(config) | {"architectures": ["Eagle3DraftModel"], "target_hidden_size": None}
    written["eagle_aux_hidden_state_layer_ids"] = [*written["eagle_aux_hidden_state_layer_ids"], 2]
    return written


def as_bare(config: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary is the target's, and so are embedding and output layer."""
    return config | {"draft_vocab_size": None}


BEFORE = {"norm_before_residual": True}
LAYOUTS = {
    "safeailab": Layout({"bos_token_id": 1, "pretraining_tp": 1, "use_cache": True, "torch_dtype": "float16"}),
    "specforge": Layout({"attention_bias": False, "tie_word_embeddings": False}, as_specforge, layers=(1, 1, 1)),
    "modelopt": Layout(
        {"norm_before_fc": True, "norm_output": True, "rope_scaling": None}, as_modelopt, layers=(2, 2, 1)
    ),
    "speculators": Layout(BEFORE, as_speculators, (("midlayer.", "layers.0."),), has_embedding=True),
    "eagle 3.1": Layout(
        BEFORE | {"norm_before_fc": True, "norm_output": True, "fc_norm": False, "sliding_window": 5},
        as_later_speculators,
        (("midlayer.", "layers.0."),),
    ),
    "norm of each stream": Layout(
        {"fc_norm": True, "norm_output": True},
        names=(("midlayer.", "model.layers.0."), ("fc", "model.fc"), ("norm.", "model.norm.")),
    ),
    "qwen3 layer": Layout(
        BEFORE | {"model_type": "qwen3"}, as_speculators, (("midlayer.", "layers.0."),), has_embedding=True
    ),
    "bare": Layout(
        {"draft_vocab_size": 97}, lambda config: config | {"draft_vocab_size": None}, has_output_layer=False
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_are_read_as_they_are_published(
    llama_path: pathlib.Path, config: dict[str, Any], name: str, tmp_path: pathlib.Path
) -> None:
    layout = LAYOUTS[name]
    if name == "modelopt":
        # It names no layers: they are the usual ones, of a model that has them.
        llama_path = write(tmp_path / "deeper", 4)
    plain = config | {"eagle_aux_hidden_state_layer_ids": list(layout.layers)} | layout.fields
    named = random_head(plain)
    oracle = Oracle(llama_path, plain, named)
    if layout.has_embedding:
        oracle.head.embedding = named["embed_tokens.weight"] = torch.randn(97, 32) * 0.3
    if not layout.has_output_layer:
        oracle.head.tensors = named | {"lm_head.weight": oracle.model.lm_head.weight.detach()}
        oracle.head.target_ids = torch.arange(97)
        for own in ("lm_head.weight", "d2t", "t2d"):
            del named[own]
    for own, theirs in layout.names:
        named = {theirs + key.removeprefix(own) if key.startswith(own) else key: each for key, each in named.items()}
    model = load(llama_path, "cpu")
    runner, drafter = cpu_runner(
        model, head_of(write_head(tmp_path / "head", layout.written(dict(plain)), named), model)
    )
    assert_as_oracle(oracle, drafter, run(runner, [job(2, 9)], lambda: 3))


def test_prompts_in_chunks_and_behind_a_prefix_hit_draft_the_same(
    target: CausalLM, head: EagleHead, oracle: Oracle
) -> None:
    head_drafting.assert_chunks_and_prefix_hits_draft_the_same((target, head), oracle)


def test_blocks_that_are_copied_have_states_too(target: CausalLM, head: EagleHead, oracle: Oracle) -> None:
    head_drafting.assert_copied_blocks_have_states((target, head), oracle)


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_a_head_changes_no_answer(target: CausalLM, llama: CausalLM, head: EagleHead, option: str) -> None:
    """Even a random one, whatever is asked of the sampler."""
    head_drafting.assert_no_answer_changes((target, head), llama, option, 12)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantized_cache_answers_as_without(
    target: CausalLM, llama: CausalLM, head: EagleHead, kv_dtype: str
) -> None:
    head_drafting.assert_no_answer_changes((target, head), llama, "temperature", 16, kv_dtype)


def trained(oracle: Oracle, sequences: list[list[int]], steps: int) -> Tensors:
    """A head that has learned what stands behind each token, from streams and its own states."""
    knobs = {name: tensor for name, tensor in oracle.head.tensors.items() if name.endswith("weight")}
    knobs = {name: tensor.clone().requires_grad_() for name, tensor in knobs.items()}
    learning = PlainHead(oracle.head.config, oracle.head.tensors | knobs, oracle.head.embedding)
    draft_ids = {token: own for own, token in enumerate(learning.target_ids.tolist())}
    streams = [oracle.streams(tokens) for tokens in sequences]
    labels = [torch.tensor([draft_ids.get(token, -100) for token in tokens[2:]]) for tokens in sequences]
    optimizer = torch.optim.Adam(knobs.values(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for tokens, found, wanted in zip(sequences, streams, labels, strict=True):
            states = learning.states(found[:-2])
            loss = torch.zeros(())
            for depth in range(2):
                logits, own = learning.forward(torch.tensor(tokens[1 + depth : -1]), states)
                loss = loss + torch.nn.functional.cross_entropy(logits, wanted[depth:], ignore_index=-100)
                # As in a second pass, whose states are the first one's.
                states = own[:-1]
            loss.backward()
        optimizer.step()
    return oracle.head.tensors | {name: tensor.detach() for name, tensor in knobs.items()}


@pytest.fixture(scope="session")
def trained_folder(
    llama_path: pathlib.Path, llama: CausalLM, config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """A head of the whole vocabulary that knows the answers of the tests below."""
    whole = config | {"draft_vocab_size": 97}
    jobs = [job(row, 24) for row in (0, 2, 3)]
    answers = plain_answers(lambda: plain_runner(llama), jobs)
    oracle = Oracle(llama_path, whole, random_head(whole, scale=0.15))
    tensors = trained(oracle, [each.prompt + each.tokens for each in answers], 150)
    return write_head(tmp_path_factory.mktemp("heads") / "trained", whole, tensors)


def pair(llama_path: pathlib.Path, folder: pathlib.Path, device: str = "cpu") -> tuple[CausalLM, EagleHead]:
    """A target of its own, and a head beside it."""
    model = load(llama_path, "cpu" if device == "cpu" else "cuda:0")
    return model, head_of(folder, model)


@pytest.mark.slow  # It trains a head.
def test_a_head_that_knows_the_model_has_its_drafts_accepted(
    llama: CausalLM, llama_path: pathlib.Path, trained_folder: pathlib.Path
) -> None:
    jobs = [job(row, 24) for row in (0, 2, 3)]
    head_drafting.assert_drafts_are_accepted(pair(llama_path, trained_folder), llama, jobs, 2.5)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(
    ("batch_sizes", "kv_dtype"),
    # A small model's passes, padded, are drafted with every day (test_draft_model.py).
    [pytest.param(sizes, kv, marks=pytest.mark.slow) for sizes, kv in (((1, 2, 4, 8), "int8"), ((), "auto"))],
    ids=["padded", "exact"],
)
def test_a_gpus_passes_draft_what_a_cpus_draft(
    llama: CausalLM,
    llama_path: pathlib.Path,
    trained_folder: pathlib.Path,
    device: str,
    batch_sizes: tuple[int, ...],
    kv_dtype: str,
) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    make = functools.partial(pair, llama_path, trained_folder)
    head_drafting.assert_a_gpu_drafts_what_a_cpu_drafts(make, llama, device, batch_sizes, kv_dtype)
