"""An EAGLE-3 head beside its target: it drafts what plain torch says, and changes no answer.

On a CPU, and by the GPU's kernels in the interpreter. The target's streams are those that
transformers computes of the same folder.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import pytest
import torch
from tests.support.eagle_heads import PlainHead, Tensors, head_config, random_head, write_head
from tests.support.kernel_case import DEVICES
from tests.worker.conftest import load
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


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """The form of speculators, with layers counted by the streams that leave them."""
    inner = dict(config)
    own = {name: inner.pop(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    layers = [layer - 1 for layer in own.pop("eagle_aux_hidden_state_layer_ids")]
    own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    return own | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": inner}


@pytest.mark.parametrize("form", ["norm_before_residual", "layers.0. and speculators", "embedding"])
def test_other_forms_of_folders_are_read(
    llama_path: pathlib.Path, config: dict[str, Any], tensors: Tensors, form: str, tmp_path: pathlib.Path
) -> None:
    plain = config | {"eagle_aux_hidden_state_layer_ids": [1, 1, 1], "norm_before_residual": form.startswith("norm")}
    oracle, written, named = Oracle(llama_path, plain, tensors), plain, dict(tensors)
    if form.startswith("layers"):
        written, named = nested(plain), {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    if form == "embedding":
        oracle.head.embedding = named["embed_tokens.weight"] = torch.randn(97, 32) * 0.3
    model = load(llama_path, "cpu")
    runner, drafter = cpu_runner(model, head_of(write_head(tmp_path / "head", written, named), model))
    assert_as_oracle(oracle, drafter, run(runner, [job(1, 6)], lambda: 2))


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
