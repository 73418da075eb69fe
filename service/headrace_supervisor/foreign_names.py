"""Names by which users of other servers know our settings: vLLM's first of all, and Triton's.

Owns one table of each kind. A name that means exactly what one of our settings means is taken like
our own; another one is refused in a sentence that says what there is instead. A sentence is used
where a command has all the options that it names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# Field -> further options, which mean exactly the same. A yes or no has a --no- form of each.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "model_name": ("--served-model-name",),
    "tp": ("--tensor-parallel-size", "-tp"),
    "pp": ("--pipeline-parallel-size", "-pp"),
    "expert_parallel": ("--enable-expert-parallel",),
    "replicas": ("--data-parallel-size", "-dp"),
    "max_model_len": ("--max-seq-len",),
    "kv_dtype": ("--kv-cache-dtype",),
    "kv_memory": ("--kv-cache-memory-bytes",),
    "num_blocks": ("--num-gpu-blocks-override",),
    "enable_prefix_cache": ("--enable-prefix-caching",),
    "speculate_tokens": ("--num-speculative-tokens",),
    "tls_cert": ("--ssl-certfile",),
    "tls_key": ("--ssl-keyfile",),
    "tls_client_ca": ("--ssl-ca-certs",),
}

# Field -> another server's word for a value -> ours.
VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"},
    "kv_dtype": {"fp8_e4m3": "fp8"},
}

_LISTEN = "addresses are given whole, as in --listen 127.0.0.1:50051"
_LISTEN_BOTH = f"{_LISTEN} for gRPC and --openai-listen 127.0.0.1:8000 for OpenAI's HTTP API"
_FOLDER_SAYS = "the model's folder says so itself"

# Option without its dashes -> what there is instead.
_INSTEAD: Mapping[str, str] = {
    "host": _LISTEN_BOTH,
    "port": _LISTEN_BOTH,
    "http-port": _LISTEN_BOTH,
    "grpc-port": _LISTEN,
    "uds": "--listen unix:PATH listens on a Unix socket",
    "metrics-port": "--metrics-listen HOST:PORT serves metrics",
    "gpu-memory-utilization": (
        "memory is given in bytes, as in --memory-budget 40GiB for all that the model takes of each GPU, or "
        "--kv-memory 20GiB for its KV cache; without either the cache takes what the GPU has left"
    ),
    "allowed-origins": "--openai-cors-origins names the origins whose pages may call OpenAI's HTTP API",
    "api-key": "keys are in a file with their rights and quotas: `headrace keys new`, then --keys-file FILE",
    "quantization": f"{_FOLDER_SAYS} where it is quantized; --quantize rounds another while it is read",
    "q": f"{_FOLDER_SAYS} where it is quantized; --quantize rounds another while it is read",
    "revision": "it stands behind the name, as in --model ORG/NAME@REVISION",
    "download-dir": "models of a hub are where HF_HOME says; `headrace pull` fetches one beforehand",
    "load-format": "--load folder (the default) or dummy says where weights come from",
    "enforce-eager": "--graph-sizes off leaves CUDA graphs out",
    "cuda-graph-sizes": "--graph-sizes 1,2,4,8 says which batch sizes are captured",
    "cudagraph-capture-sizes": "--graph-sizes 1,2,4,8 says which batch sizes are captured",
    "enable-chunked-prefill": "prompts always come in chunks, as large as --step-time-target-ms allows",
    "trust-remote-code": "a model folder's own code is never run; `headrace doctor` says whether a model can be served",
    "tokenizer": "the tokenizer is the one in the model's folder",
    "chat-template": "the chat template is the one in the model's folder",
    "max-logprobs": "up to 20 log probabilities a token are always allowed",
    "swap-space": "what the KV cache has no room for is computed again; --kv-memory makes room",
    "cpu-offload-gb": "weights stay on the GPU; --quantize makes them smaller, and --tp shares them among GPUs",
    "speculative-config": "--speculate says who drafts tokens, --speculate-tokens how many of them a step verifies,"
    " --draft-model which model does; method mtp is --speculate mtp",
    "speculative-model": "--draft-model names the folder of a model that drafts, with --speculate draft, or of an"
    " EAGLE-3 head, with --speculate eagle",
    "enable-auto-tool-choice": "requests with tools are always taken; --tool-format off takes none",
    "tool-call-parser": "--tool-format names the model's format of tool calls, if its folder does not say it",
    "enable-lora": "there are no LoRA adapters; a merged model's folder is served like any other",
    "otlp-traces-endpoint": "--otlp-endpoint takes traces and metrics",
    "uvicorn-log-level": "--log-level says which lines are logged",
    "disable-log-requests": "requests are not logged; --trace-sample-ratio says how many are traced",
    "disable-log-stats": "figures are not logged; --metrics-listen HOST:PORT serves them",
    "model-store": "--model-repository names the folder of models",
    "model-control-mode": "models of --model-repository are loaded and unloaded by `headrace admin`",
    "log-verbose": "--log-level debug logs most",
    # Ours, of other commands.
    "hosts": "`headrace backend` shares one engine out to several hosts, `headrace ranks` joins it on each other one, "
    "and `headrace service` stands before any number of such engines",
}
# The same where the sentence above names what a command does not have.
_INSTEAD_ALONE: Mapping[str, str] = {
    "host": _LISTEN,
    "port": _LISTEN,
    "replicas": "a backend is one engine; each further one is a backend of its own, on this host or another, and "
    "`headrace service` names all of them",
}
_OPTION = re.compile(r"--[a-z][a-z-]*[a-z]")


def instead_of(option: str, options: Collection[str]) -> str | None:
    """Returns what a command has instead of an option that only other servers have.

    Args:
        option: the option as it was typed, or a key of a file.
        options: the command's own options. A sentence that names any other is none of its.
    """
    name = option.lstrip("-").replace("_", "-").lower()
    sentences = (table[name] for table in (_INSTEAD, _INSTEAD_ALONE) if name in table)
    return next((text for text in sentences if set(_OPTION.findall(text)).issubset(options)), None)


def field_of(name: str) -> str | None:
    """Returns the setting that another server's name means; None if it means none."""
    typed = "--" + name.lstrip("-").replace("_", "-").lower()
    return next((field for field, names in ALIASES.items() if typed in names), None)


def our_word(field: str, value: Any) -> Any:
    """Returns a setting's value in our words, if it is a word at all."""
    return VALUES.get(field, {}).get(value, value) if isinstance(value, str) else value


def refused() -> Mapping[str, str]:
    """Returns all options that are refused, and with which sentence."""
    return _INSTEAD
