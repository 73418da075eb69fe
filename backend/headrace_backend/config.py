"""Configuration of the backend: the engine's part, which workers read too, and the socket's part.

Owns the fields with their units, ranges and defaults. Where values come from (defaults, TOML,
environment, flags) is the supervisor's business; here is one frozen object per process. It reaches
a worker as JSON in its arguments.
"""

from __future__ import annotations

import pathlib
import re
from typing import Annotated, Any, Final, Literal, Self

import pydantic
from pydantic import AfterValidator, Field

from headrace_backend.device_defaults import (
    checked_graph_sizes,
    expects_gpu,
    long_graph_sizes,
    mixed_graph_sizes,
    step_sizes,
)
from headrace_health.address import listen_address
from headrace_request import limits

# A step of fewer could not hold a block.
_LEAST_TOKENS = 16
# Inputs that may share a scale and a zero point, ascending.
QUANTIZE_GROUPS = (32, 64, 128)
_QUANTIZE_GROUP: Final = 128
# Drafts that a step verifies at most where their number is not configured; models whose attention
# would leave so many to another kernel have one less.
_MOST_DRAFTS: Final = 8
# GPUs of one machine.
MAX_TP: Final = 8
MAX_PP: Final = MAX_TP
# Each has a stage at least, or a part of one.
MAX_HOSTS: Final = 8
# More than one machine has cores; of a mistyped number, each thread would cost memory and time.
MAX_WORKER_THREADS: Final = 1024
_LONGEST_S: Final = 86_400.0
_SUFFIXES = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmM])")


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


def _with_commas(sizes: Any) -> Any:
    """Writes numbers as a TOML list has them."""
    return ",".join(map(str, sizes)) if isinstance(sizes, (list, tuple)) else sizes


def _written_out(value: Any) -> Any:
    """Writes a number as text, for a field that takes a number or a word."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _number_of_drafts(value: str) -> str:
    """Lets pass what says how many tokens a step verifies for a row."""
    if value != "auto" and value not in map(str, range(1, 1 + limits.MAX_DRAFTS)):
        raise ValueError(f"must be auto or a whole number from 1 to {limits.MAX_DRAFTS}")
    return value


def _token_count(value: Any) -> Any:
    """Reads numbers with vLLM's suffixes: k and m are powers of 1000, K and M of 1024."""
    found = _SUFFIXED.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    count = float(found[1]) * _SUFFIXES[found[2]]
    return int(count) if count.is_integer() else value


class EngineConfig(_Frozen):
    """What the engine and its workers must agree on.

    What was left to the device (0) is decided when it is made (`device_defaults`).
    """

    model: Annotated[
        pathlib.Path,
        Field(
            description=(
                "Hugging Face model folder, or a GGUF file; or the model's name on a hub, ORG/NAME[@REVISION][:FILE], "
                "which is fetched if need be"
            )
        ),
    ]
    model_name: Annotated[
        str, Field(description="name in requests: letters, digits and . _ + -; the folder's name if empty")
    ] = ""
    device: Annotated[str, Field(description="auto, cpu, or cuda[:index]")] = "auto"
    tp: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_TP,
            description=(
                "ranks that share the model (tensor parallel), each a worker process on a GPU of its own, from the "
                "device's index on"
            ),
        ),
    ] = 1
    pp: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_PP,
            description=(
                "pipeline stages, which have the model's layers one group behind the other, each with tp ranks; for "
                "models that tp ranks can't hold"
            ),
        ),
    ] = 1
    hosts: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_HOSTS,
            description=(
                "machines whose GPUs have the ranks, equally many each: this one the first, each other one those that "
                "its `headrace ranks --join` is given. Whole pipeline stages, where pp is a multiple of it"
            ),
        ),
    ] = 1
    expert_parallel: Annotated[
        bool,
        Field(
            description=(
                "each of tp ranks has some experts of a mixture whole, in place of a part of every expert; the rest "
                "of the model is shared as ever"
            )
        ),
    ] = False
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        Field(description="weights and activations; auto: the model's, fp32 on a CPU"),
    ] = "auto"
    load: Annotated[Literal["folder", "dummy"], Field(description="dummy: seeded Gaussian weights (std 0.02)")] = (
        "folder"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seed of dummy weights")] = 0
    quantize: Annotated[
        Literal["off", "int8", "int4", "fp8", "nf4"],
        Field(
            description=(
                "bits of the layers' weights, rounded to nearest while they are read; embedding, output layer "
                "(quantize_head), norms and biases stay as dtype says. fp8 on a GPU that multiplies it: products of "
                "many tokens round these too; no other scheme does, and no CPU"
            )
        ),
    ] = "off"
    quantize_group: Annotated[
        Literal[32, 64, 128], Field(description="inputs that share a scale and a zero point, of int4 alone")
    ] = _QUANTIZE_GROUP
    quantize_activations: Annotated[
        Literal["auto", "fp8"],
        Field(
            description=(
                "fp8: int4's products of many tokens round these to 8 bits with a scale for each token (W4A8), which "
                "needs a GPU with FP8 products and bf16, or a CPU, where it is slow; auto: as quantize says"
            )
        ),
    ] = "auto"
    quantize_head: Annotated[
        Literal["off", "int8", "fp8"],
        Field(
            description=(
                "bits of the output layer's weight, rounded to nearest while it is read, with a scale for each token "
                "of the vocabulary; off: as dtype says. A tied embedding stays as it is"
            )
        ),
    ] = "off"
    kv_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        Field(
            description=(
                "numbers of the KV cache: as dtype says (auto), or of 8 bits with a scale for each token and head"
            )
        ),
    ] = "auto"
    # At most `prefix_followers.LEAST_SHARED_TOKENS`.
    block_size: Annotated[Literal[16, 32, 64], Field(description="tokens per KV cache block")] = 16
    kv_memory: Annotated[
        pydantic.ByteSize,
        Field(
            description=(
                "memory of the KV cache, of each rank, as in 20GiB; 0: what the GPU leaves (on a CPU: a quarter of "
                "free memory, at most 4 GiB)"
            ),
        ),
    ] = pydantic.ByteSize(0)
    memory_budget: Annotated[
        pydantic.ByteSize,
        Field(
            description=(
                "most memory that the model may take, weights and cache and all, as in 40GiB: of each GPU, on a CPU of "
                "the machine; 0: no limit of its own"
            ),
        ),
    ] = pydantic.ByteSize(0)
    num_blocks: Annotated[int, Field(ge=0, description="KV cache blocks; overrides kv_memory; 0: from the memory")] = 0
    max_model_len: Annotated[
        int,
        pydantic.BeforeValidator(_token_count),
        Field(ge=0, description="tokens of prompt and output, as in 32768 or 32K; 0: the model's context"),
    ] = 0
    # Never 0 in a configuration: the device's default takes its place.
    max_num_seqs: Annotated[int, Field(ge=0, le=4096, description="rows of the batch; 0: 64, on a GPU 512")] = 0
    max_num_batched_tokens: Annotated[
        int,
        pydantic.BeforeValidator(_token_count),
        Field(ge=0, le=1 << 20, description="token budget of one step, 16 or more; 0: 2048, on a GPU 8192"),
    ] = 0
    graph_sizes: Annotated[
        str,
        pydantic.BeforeValidator(_with_commas),
        Field(
            description=(
                "batch sizes of decode steps captured as CUDA graphs, as in 1,2,4,8; auto: up to max_num_seqs; off: "
                "none"
            )
        ),
    ] = "auto"
    kernel_cache: Annotated[
        pathlib.Path | None,
        Field(description="folder for compiled GPU kernels; default: headrace/kernels in XDG_CACHE_HOME or ~/.cache"),
    ] = None
    speculate: Annotated[
        Literal["off", "ngram", "suffix", "draft", "eagle", "mtp"],
        Field(
            description=(
                "who drafts the next tokens of answers, which the model then verifies several at a time, without "
                "another answer than off: ngram, what followed a row's last tokens where they stood before; suffix, "
                "the same in earlier answers of the tenant too; draft, the model of draft_model; eagle, the EAGLE-3 "
                "head of draft_model; mtp, the layer for it behind the model's last one, in its own folder"
            )
        ),
    ] = "off"
    speculate_tokens: Annotated[
        str,
        pydantic.BeforeValidator(_written_out),
        AfterValidator(_number_of_drafts),
        Field(
            description=(
                "drafted tokens that a step verifies for each row: auto, as many as raise tokens per second, or "
                f"1 to {limits.MAX_DRAFTS} in every step"
            ),
        ),
    ] = "auto"
    draft_model: Annotated[
        pathlib.Path | None,
        Field(
            description=(
                "folder of a smaller model with the same vocabulary, or GGUF file, whose proposals the model verifies "
                "(speculate draft), or folder of an EAGLE-3 head that was trained for the model (speculate eagle)"
            )
        ),
    ] = None
    draft_quantize: Annotated[
        Literal["off", "int8", "fp8"],
        Field(description="bits of the weights of the draft model's layers, as quantize says of the model's"),
    ] = "off"
    draft_sharing: Annotated[
        Literal["auto", "whole", "shared"],
        Field(
            description=(
                "what each rank (tp) has of the draft model of speculate draft: whole, all of it; shared, a part, as "
                "of the model's layers; auto, a part on GPUs if ranks divide it and it has 512 MiB of weights or more"
            )
        ),
    ] = "auto"
    step_time_target_ms: Annotated[
        float,
        Field(
            ge=0,
            le=10_000,
            description=(
                "milliseconds that a step should take while answers are being written: prompts come in chunks that "
                "fit; 0: 13.8 on a GPU; on a CPU 1000, or a quarter of watchdog_s if that is less, and for every step"
            ),
        ),
    ] = 0.0
    # None: on, where states of recurrent layers can be kept, if the model has such layers.
    enable_prefix_cache: Annotated[
        bool | None,
        Field(
            description=(
                "reuse the blocks of shared prefixes; default: on, but off for models with recurrent layers where "
                "state_checkpoints is 0"
            )
        ),
    ] = None
    # None: as many as rows, within a share of the memory.
    state_checkpoints: Annotated[
        int | None,
        Field(
            ge=0,
            le=1 << 16,
            description=(
                "states that are kept for shared prefixes, of models with recurrent layers; default: max_num_seqs, in "
                "at most an eighth of the memory that weights and steps leave"
            ),
        ),
    ] = None
    ageing_s: Annotated[
        float, Field(gt=0, le=_LONGEST_S, description="seconds of waiting that weigh as much as one step of priority")
    ] = 5.0
    max_waiting_requests: Annotated[int, Field(ge=1, description="waiting requests before new ones are refused")] = 1024
    max_waiting_tokens: Annotated[int, Field(ge=1, description="waiting prompt tokens before new ones are refused")] = (
        1 << 22
    )
    max_outputs: Annotated[int, Field(ge=1, le=limits.MAX_OUTPUTS, description="most outputs (n) of one request")] = 16
    log_ttl_s: Annotated[
        float, Field(gt=0, le=_LONGEST_S, description="seconds an ended request's token log is kept")
    ] = 600.0
    max_logs: Annotated[int, Field(ge=1, description="ended requests kept")] = 10_000
    max_log_bytes: Annotated[int, Field(ge=1 << 16, description="bytes of ended requests' token logs kept")] = 256 << 20
    max_prompt_logprobs_bytes: Annotated[
        int,
        Field(
            ge=1 << 16,
            le=1 << 30,
            description=(
                "bytes that the log probabilities of one prompt may take: 10 a token, and 8 for each most likely one"
            ),
        ),
    ] = 32 << 20
    max_time_limit_s: Annotated[
        float,
        Field(
            gt=0, le=limits.MAX_TIME_LIMIT_S, description="longest life of a request that has no deadline of its own"
        ),
    ] = 3600.0
    worker_threads: Annotated[
        int, Field(ge=0, le=MAX_WORKER_THREADS, description="CPU threads of a worker; 0: all cores but one")
    ] = 0
    watchdog_s: Annotated[
        float,
        Field(
            gt=0,
            le=_LONGEST_S,
            description=(
                "seconds without progress (a result, on a CPU a layer) after which a worker is replaced, beyond what "
                "the step is expected to take"
            ),
        ),
    ] = 10.0
    start_timeout_s: Annotated[
        float, Field(gt=0, le=_LONGEST_S, description="seconds without start-up progress before a worker is given up")
    ] = 120.0
    max_worker_restarts: Annotated[
        int,
        Field(
            ge=0,
            description=(
                "worker deaths within a minute, or in a row without a step in between, at which the backend gives up; "
                "those that lead to a request that causes them don't count"
            ),
        ),
    ] = 3

    @pydantic.model_validator(mode="before")
    @classmethod
    def _choose_step_sizes(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        chosen = step_sizes(str(values.get("device", "auto")))
        return {**values, **{name: size for name, size in chosen.items() if values.get(name, 0) in (0, "0")}}

    @pydantic.model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.max_num_batched_tokens < _LEAST_TOKENS:
            raise ValueError(
                f"max_num_batched_tokens should be {_LEAST_TOKENS} or more, is {self.max_num_batched_tokens}"
            )
        checked_graph_sizes(self.graph_sizes, self.max_num_seqs)
        self._check_hosts()
        if self.speculate != "off" and self.pp > 1:
            raise ValueError(
                f"speculate is {self.speculate} and pp is {self.pp}: drafts are verified where one stage has all "
                "layers; pp 1 works, or speculate off"
            )
        if self.speculate == "draft" and self.draft_model is None:
            raise ValueError("speculate is draft, and no draft_model is named: a folder with the model's vocabulary")
        if self.speculate == "eagle" and self.draft_model is None:
            raise ValueError("speculate is eagle, and no draft_model is named: the folder of the model's EAGLE-3 head")
        if self.draft_model is not None and self.speculate not in ("draft", "eagle"):
            raise ValueError(
                f"draft_model is {self.draft_model}, and speculate is {self.speculate}: a draft model is for speculate "
                "draft, and a head for speculate eagle"
            )
        if self.speculate_tokens != "auto" and self.speculate == "off":
            raise ValueError(
                f"speculate_tokens is {self.speculate_tokens}, and speculate is off: nobody drafts; speculate ngram, "
                "suffix, draft, eagle or mtp does"
            )
        if self.draft_quantize != "off" and self.speculate != "draft":
            raise ValueError(
                f"draft_quantize is {self.draft_quantize}, and speculate is {self.speculate}: it is for the draft "
                "model of speculate draft"
            )
        if self.draft_sharing != "auto" and self.speculate != "draft":
            raise ValueError(
                f"draft_sharing is {self.draft_sharing}, and speculate is {self.speculate}: it is for the draft model "
                "of speculate draft"
            )
        if self.quantize_activations != "auto" and self.quantize != "int4":
            raise ValueError(
                f"quantize_activations is {self.quantize_activations}, and quantize is {self.quantize}: it is for "
                "int4, and fp8 rounds activations of its own accord where the GPU can; auto works"
            )
        if self.quantize != "int4" and self.quantize_group != _QUANTIZE_GROUP:
            raise ValueError(
                f"quantize_group is for int4, and quantize is {self.quantize}: {_QUANTIZE_GROUP} (the default) works, "
                "or quantize int4"
            )
        return self

    def _check_hosts(self) -> None:
        """Raises ValueError if the ranks can't be dealt out to the machines."""
        asked = f"pp is {self.pp} and tp is {self.tp}, which are {self.num_ranks} ranks"
        if self.num_ranks > MAX_TP * self.hosts:
            have = f"one machine has at most {MAX_TP}"
            if self.hosts > 1:
                have = f"{self.hosts} machines have at most {MAX_TP * self.hosts}"
            raise ValueError(f"{asked}; {have}: pp of at most {MAX_TP * self.hosts // self.tp} works with tp {self.tp}")
        if self.pp % self.hosts and (self.hosts % self.pp or self.num_ranks % self.hosts):
            raise ValueError(
                f"{asked}, and hosts is {self.hosts}: each machine has as many whole stages, or as large a part of "
                f"one; hosts {', '.join(map(str, self._working_hosts()))} work"
            )

    def _working_hosts(self) -> list[int]:
        """Numbers of machines over which the ranks can be dealt out."""
        numbers = range(1, MAX_HOSTS + 1)
        return [n for n in numbers if self.pp % n == 0 or (n % self.pp == 0 and self.num_ranks % n == 0)]

    @property
    def num_ranks(self) -> int:
        """Worker processes of the model: `tp` of each of `pp` stages."""
        return self.pp * self.tp

    @property
    def ranks_per_host(self) -> int:
        """Ranks that each machine has, one behind the other: the first machine rank 0."""
        return self.num_ranks // self.hosts

    @property
    def reporting_rank(self) -> int:
        """The rank whose results count: the first one of the last stage, where tokens are drawn."""
        return (self.pp - 1) * self.tp

    def fixed_drafts(self) -> int | None:
        """Drafted tokens that a step verifies for each row; None: as many as pay."""
        return None if self.speculate_tokens == "auto" else int(self.speculate_tokens)

    @property
    def tokens_per_row(self) -> int:
        """Most tokens that a step settles for a row that decodes; 1: nobody drafts."""
        return 1 if self.speculate == "off" else 1 + (self.fixed_drafts() or _MOST_DRAFTS)

    @property
    def drafts_by_passes(self) -> bool:
        """Whether a model or head with a KV cache of its own drafts."""
        return self.speculate in ("draft", "eagle", "mtp")

    @property
    def drafts_from_history(self) -> bool:
        """Whether tokens are drafted from those that a row has: workers must know them all."""
        return self.speculate in ("ngram", "suffix")

    def expected_device(self) -> str:
        """The device that the configuration means on this machine: "cpu" or "cuda:<index>".

        Whether it can be used is seen by the worker.
        """
        if not expects_gpu(self.device):
            return "cpu"
        return self.device if ":" in self.device else "cuda:0"

    def captured_batch_sizes(self, has_experts: bool = False) -> tuple[int, ...]:
        """Decode batch sizes to capture as CUDA graphs, ascending; none if graphs are off.

        `has_experts` says whether the model is a mixture of experts.
        """
        return checked_graph_sizes(self.graph_sizes, self.max_num_seqs, has_experts)

    def captured_mixed_sizes(self) -> tuple[int, ...]:
        """Token counts of the mixed steps to capture as CUDA graphs, ascending.

        There are none if graphs are off.

        The worker says which of them are kept.
        """
        return mixed_graph_sizes(self.max_num_batched_tokens) if self.captured_batch_sizes() else ()

    def long_graph_sizes(self) -> tuple[int, ...]:
        """Tokens of longer mixed steps, to capture where the worker finds that it pays."""
        return long_graph_sizes(self.max_num_batched_tokens) if self.captured_batch_sizes() else ()


class BackendConfig(_Frozen):
    """The settings of the backend process: its engine and its socket."""

    engine: EngineConfig
    listen: Annotated[str, Field(description="unix:PATH (in a folder of mode 0700) or HOST:PORT")]
    token_file: Annotated[
        pathlib.Path | None,
        Field(description="file with the shared secret that services must present; HOST:PORT needs it, or mTLS"),
    ] = None
    tls_cert: Annotated[
        pathlib.Path | None,
        Field(description="PEM file of the backend's certificate on HOST:PORT; with tls_key and tls_client_ca"),
    ] = None
    tls_key: Annotated[pathlib.Path | None, Field(description="PEM file of the certificate's private key")] = None
    tls_client_ca: Annotated[
        pathlib.Path | None, Field(description="PEM file of CAs; services must show a certificate of one of them")
    ] = None
    refusal_file: Annotated[
        pathlib.Path | None,
        Field(description="JSON file that is made when a start is refused: reason, does_not_fit"),
    ] = None
    probe: Annotated[
        Annotated[str, AfterValidator(listen_address)] | None,
        Field(
            description=(
                "unix:PATH or HOST:PORT that answers health checks (grpc.health.v1) alone, without TLS and secrets: "
                "for kubelets; SERVING means that steps are computed"
            ),
        ),
    ] = None
    telemetry_socket: Annotated[
        str, Field(description="path of the telemetry process's socket; empty: nothing is reported")
    ] = ""
    replica: Annotated[
        int, Field(ge=0, description="its number among the model's backends, by which telemetry tells them apart")
    ] = 0
    hosts_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=_LONGEST_S,
            description="seconds that the backend waits for machines of its ranks (hosts) that are missing, then ends",
        ),
    ] = 600.0
    drain_grace_s: Annotated[
        float, Field(ge=0, le=_LONGEST_S, description="seconds that running requests get to finish after SIGTERM")
    ] = 10.0
    max_message_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 28, description="largest message on the socket")] = (
        64 << 20
    )
    log_format: Annotated[
        Literal["console", "json"], Field(description="log lines on stderr, for people or for machines")
    ] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least serious log lines that are written")
    ] = "info"
