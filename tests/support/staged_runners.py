"""Pipeline stages one after the other in one process: their runners, joined without sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from headrace_backend.config import EngineConfig
from headrace_backend.models.build import ModelBuild
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.load import load_model
from headrace_backend.parallel.stage_links import Receipt, StageLinks
from headrace_backend.pp_rules import stages
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import StepPlan
from headrace_backend.weights.placement import ALONE, Shard
from headrace_backend.weights.scheme import Schemes
from headrace_backend.worker.sampling.sampler import SampledTokens
from headrace_backend.worker.step.runner import Launched, Runner
from headrace_backend.worker.step.stage_runner import StageRunner
from headrace_model_folder import ModelFolder


class MemoryReceipt(Receipt):
    """What lies there as soon as the other stage has computed it."""

    def __init__(self, sent: deque[torch.Tensor], out: torch.Tensor) -> None:
        self._sent = sent
        self._out = out

    def wait(self) -> torch.Tensor:
        arrived = self._sent.popleft()
        assert (arrived.shape, arrived.dtype) == (self._out.shape, self._out.dtype), "stages disagree"
        return self._out.copy_(arrived)


class MemoryLinks(StageLinks):
    """Links through memory, with copies of what is sent."""

    def __init__(self, index: int, streams: Sequence[deque[torch.Tensor]], tokens: deque[torch.Tensor]) -> None:
        self._stage, self._num_stages = index, len(streams)
        self._sent_streams, self._sent_tokens = streams, tokens

    def send_stream(self, stream: torch.Tensor) -> None:
        self._sent_streams[self._stage + 1].append(stream.clone())

    def receive_stream(self, out: torch.Tensor) -> Receipt:
        return MemoryReceipt(self._sent_streams[self._stage], out)

    def send_tokens(self, tokens: torch.Tensor) -> None:
        self._sent_tokens.append(tokens.clone())

    def receive_tokens(self, out: torch.Tensor) -> Receipt:
        return MemoryReceipt(self._sent_tokens, out)


class StagedRunners:
    """All stages, each of which computes its part of a plan in turn."""

    def __init__(self, runners: Sequence[Runner], models: Sequence[CausalLM]) -> None:
        streams = [deque[torch.Tensor]() for _ in runners]
        tokens = deque[torch.Tensor]()
        self._stages = [
            StageRunner(runner, MemoryLinks(index, streams, tokens), model.hidden_size, next(model.parameters()).data)
            for index, (runner, model) in enumerate(zip(runners, models, strict=True))
        ]
        self._sampled: SampledTokens | None = None

    @property
    def launched(self) -> Launched:
        return self._stages[-1].launched

    def forward(self, plan: StepPlan) -> torch.Tensor:
        for stage in self._stages:
            hidden = stage.forward(plan)
            self._sampled = stage.sample(plan, hidden)
        return hidden

    @property
    def draws(self) -> bool:
        return True

    def sample(self, plan: StepPlan, hidden: torch.Tensor, masks: StepMasks | None = None) -> SampledTokens | None:
        return self._sampled

    def reset(self) -> None:
        raise AssertionError("stages are never reset")


def stage_models(
    folder: ModelFolder, pp: int, schemes: Schemes | None = None, shard: Shard = ALONE, device: str = "cpu"
) -> list[CausalLM]:
    """The parts of a folder's model that so many stages have, each loaded by itself."""
    where = (torch.float32, torch.device(device), schemes or Schemes(), shard, folder.tensors, None)
    divided = stages(EngineConfig(model=folder.path, device="cpu", pp=pp), folder.config)
    builds = [ModelBuild(folder.config, *where, stage) for stage in divided]
    return [load_model(build, folder, lambda *_: None) for build in builds]


def staged(models: Sequence[CausalLM], make_runner: Callable[[CausalLM], Runner]) -> StagedRunners:
    return StagedRunners([make_runner(model) for model in models], models)
