"""An EAGLE-3 head beside its target: it drafts what plain torch says, and changes no answer.

On a CPU, and by the GPU's kernels in the interpreter. The target's streams are those that
transformers computes of the same folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.eagle_heads import PlainHead, Tensors, head_config, random_head, write_head
from tests.support.kernel_case import DEVICES
from tests.worker.conftest import load
from tests.worker.driver import MAX_MODEL_LEN, NUM_ROWS, Entry, admission, execute, step
from tests.worker.speculation.drafted_rows import Job, plain_answers, run
from tests.worker.speculation.test_cpu_verification import OPTIONS, PROMPTS, assert_same, job
from tests.worker.speculation.test_cpu_verification import runner as plain_runner
from tests.worker.speculation.test_draft_model import (
    NUM_DRAFTS,
    caches_of,
    drafting_cpu_runner,
    drafting_gpu_runner,
)

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.eagle_head import EagleHead, HeadBuild
from headrace_backend.step.plan import StepResult
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.step.cpu_draft_model import CpuDraftModel
from headrace_backend.worker.step.cpu_runner import CpuRunner
from headrace_backend.worker.step.head_drafts import HeadDrafts
from headrace_kernels.triton_runtime import INTERPRETED, forced
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


class Recording(CpuDraftModel):
    """Keeps what it drafted, with the place of each draft in its row's sequence."""

    drafted: list[tuple[int, int, list[int]]]

    def draft(self, drafted: DraftedRows) -> torch.Tensor:
        positions = self._rows.next_positions[torch.from_numpy(drafted.rows).long()].tolist()
        found = super().draft(drafted)
        counts = drafted.counts.tolist()
        for row, position, count, drafts in zip(drafted.rows.tolist(), positions, counts, found.tolist(), strict=True):
            self.drafted.append((row, position + 1, drafts[:count]))
        return found


def cpu_runner(target: CausalLM, head: EagleHead, kv_dtype: str = "auto") -> tuple[CpuRunner, Recording]:
    drafts = HeadDrafts(head, caches_of(head, 1, kv_dtype)[0], NUM_ROWS)
    runner, drafter = drafting_cpu_runner(target, drafts, kv_dtype, Recording)
    assert isinstance(drafter, Recording)
    drafter.drafted = []
    return runner, drafter


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


def assert_as_oracle(oracle: Oracle, drafter: Recording, jobs: list[Job]) -> None:
    sequences = {each.row: each.prompt + each.tokens for each in jobs}
    assert drafter.drafted
    for row, place, drafts in drafter.drafted:
        # Steps that were planned ahead draft behind an answer's end too.
        if place <= len(sequences[row]):
            assert drafts == oracle.drafts(sequences[row][:place], len(drafts)), (row, place)


def test_a_head_drafts_what_plain_torch_says(target: CausalLM, head: EagleHead, oracle: Oracle) -> None:
    """Over rows of several lengths, whose answers settle one to five tokens a step."""
    runner, drafter = cpu_runner(target, head)
    jobs = [job(row, 12) for row in (0, 3, 4)]
    found = run(runner, jobs, lambda: NUM_DRAFTS)
    assert_as_oracle(oracle, drafter, found)


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


def decoded(runner: CpuRunner, row: int, position: int, output_position: int) -> list[int]:
    """One step of a row with drafts: what it settled."""
    entry = Entry(row, position, None, (row,), output_position, num_drafts=NUM_DRAFTS)
    result = execute(runner, step([entry]))
    return result.tokens[: result.counts[0] if result.counts.size else 1].tolist()


def test_prompts_in_chunks_and_behind_a_prefix_hit_draft_the_same(
    target: CausalLM, head: EagleHead, oracle: Oracle
) -> None:
    """The first token of a chunk needs the state before it, which another step or row computed."""
    prompt = PROMPTS[4][:30]
    runner, drafter = cpu_runner(target, head)
    chunks = [Entry(0, 0, prompt[:11]), Entry(0, 11, prompt[11:17]), Entry(0, 17, prompt[17:], (0,))]
    for place, chunk in enumerate(chunks):
        execute(runner, step([chunk], [admission(0)] if not place else [], {0: [5, 2, 7]} if not place else {}))
    decoded(runner, 0, 30, 1)
    # Another row finds the first block's 16 tokens, and goes on otherwise.
    other = [*prompt[:16], *PROMPTS[3][:9]]
    execute(runner, step([Entry(1, 16, other[16:], (1,))], [admission(1)], {1: [5, 9, 11]}))
    decoded(runner, 1, 25, 1)
    assert [(row, place) for row, place, _ in drafter.drafted] == [(0, 31), (1, 26)]
    for (_, _, drafts), tokens in zip(drafter.drafted, (prompt, other), strict=True):
        logits = oracle.model(torch.tensor([tokens])).logits[0, -1]
        assert drafts == oracle.drafts([*tokens, int(logits.argmax())], NUM_DRAFTS)


def test_blocks_that_are_copied_have_states_too(target: CausalLM, head: EagleHead, oracle: Oracle) -> None:
    """A fork draws from its leader's prompt, whose last block is copied for it."""
    prompt = PROMPTS[2]
    runner, drafter = cpu_runner(target, head)
    admitted = [admission(0), admission(1, output_index=1)]
    execute(runner, step([Entry(0, 0, prompt, (0, 1))], admitted, {0: [0, 1, 2], 1: [0, 9, 10]}))
    entries = [Entry(row, len(prompt), None, (row,), 1, num_drafts=NUM_DRAFTS) for row in (0, 1)]
    execute(runner, step(entries, copies=((1, 9),)))
    tokens = [*prompt, int(oracle.model(torch.tensor([prompt])).logits[0, -1].argmax())]
    assert [drafts for _, _, drafts in drafter.drafted] == [oracle.drafts(tokens, NUM_DRAFTS)] * 2


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_a_head_changes_no_answer(target: CausalLM, llama: CausalLM, head: EagleHead, option: str) -> None:
    """Even a random one, whatever is asked of the sampler."""
    jobs = [job(row, 12, **OPTIONS[option]) for row in (0, 3)]
    expected = plain_answers(lambda: plain_runner(llama), jobs)
    assert_same(run(cpu_runner(target, head)[0], jobs, lambda: NUM_DRAFTS), expected)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantized_cache_answers_as_without(
    target: CausalLM, llama: CausalLM, head: EagleHead, kv_dtype: str
) -> None:
    jobs = [job(row, 16, **OPTIONS["temperature"]) for row in (0, 3)]
    expected = plain_answers(lambda: plain_runner(llama, None, kv_dtype), jobs)
    assert_same(run(cpu_runner(target, head, kv_dtype)[0], jobs, lambda: NUM_DRAFTS), expected)


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


def settled_per_step(results: list[StepResult]) -> float:
    """Tokens that a row's step settles on average, behind prompts."""
    return float(np.concatenate([result.counts for result in results]).mean())


@pytest.mark.slow  # It trains a head.
def test_a_head_that_knows_the_model_has_its_drafts_accepted(
    llama: CausalLM, llama_path: pathlib.Path, trained_folder: pathlib.Path
) -> None:
    jobs, results = [job(row, 24) for row in (0, 2, 3)], list[StepResult]()
    runner, _ = cpu_runner(*pair(llama_path, trained_folder))
    found = run(runner, jobs, lambda: NUM_DRAFTS, ahead=0, on_result=results.append)
    assert_same(found, plain_answers(lambda: plain_runner(llama), jobs))
    assert settled_per_step(results) > 2.5


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
    """Answers are equal, and as many tokens are settled in each step."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    jobs = [job(0, 8), job(2, 6, **OPTIONS["temperature"])]
    expected, wanted, results = plain_answers(lambda: plain_runner(llama, None, kv_dtype), jobs), [], []
    on_cpu, _ = cpu_runner(*pair(llama_path, trained_folder), kv_dtype)
    run(on_cpu, jobs, lambda: NUM_DRAFTS, on_result=lambda result: wanted.append(result.counts.tolist()))
    jobs = [dataclasses.replace(each, tokens=[], ok=[], num_planned=0) for each in jobs]
    with forced() if device == "cpu" else contextlib.nullcontext():
        model, head = pair(llama_path, trained_folder, device)
        drafts = HeadDrafts(head, caches_of(head, 1, kv_dtype)[0], NUM_ROWS)
        on_gpu = drafting_gpu_runner(model, drafts, batch_sizes, kv_dtype)
        found = run(on_gpu, jobs, lambda: NUM_DRAFTS, on_result=lambda result: results.append(result.counts.tolist()))
    assert_same(found, expected)
    assert results == wanted
    assert any(count >= 4 for counts in results for count in counts)
