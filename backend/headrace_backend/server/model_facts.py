"""What the backend knows about its model.

It gives limits to the engine, the bytes of tokens to stop strings, and the description to services.

Owns what is derived from the model folder and the configuration; the workers add what only they
know, once they are ready.
"""

from __future__ import annotations

from headrace_backend.cache_groups import cache_layout
from headrace_backend.config import EngineConfig
from headrace_backend.engine.request import ModelLimits
from headrace_backend.server.model_cost import ModelCost, model_cost
from headrace_backend.step.messages import MemoryPlan, QuantizationReport, WorkerReady
from headrace_model_folder import MeasuredLoss, ModelFolder
from headrace_protos.engine.v1 import engine_pb2

# Names of types as services and callers know them, by those of config.json.
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def model_limits(config: EngineConfig, folder: ModelFolder) -> ModelLimits:
    """What the engine must know of the model."""
    return ModelLimits(
        vocab_size=folder.config.vocab_size,
        max_model_len=config.max_model_len or folder.config.max_position_embeddings,
        eos_token_ids=folder.generation_defaults.eos_token_ids,
        attention_window=folder.config.description.window,
        cache_groups=cache_layout(config, folder.config).groups,
        keeps_states=bool(folder.config.description.recurrent_layers),
    )


def text_bytes(folder: ModelFolder) -> list[bytes] | None:
    """[vocab_size] what each token adds to the text: special tokens and unused ids add nothing.

    None if the folder has no tokenizer.
    """
    table = folder.token_table
    if table is None:
        return None
    texts = [b"" if i in table.special_ids else text or b"" for i, text in enumerate(table.token_bytes)]
    # A model often has more ids than its tokenizer has tokens.
    return texts + [b""] * (folder.config.vocab_size - len(texts))


class ModelFacts:
    """What services learn about the model; the workers add what only they know."""

    def __init__(
        self, config: EngineConfig, folder: ModelFolder, limits: ModelLimits, measured: MeasuredLoss | None = None
    ) -> None:
        """Starts with nothing known from workers.

        Args:
            config: The engine's configuration.
            folder: The model's.
            limits: The model's limits, from `model_limits`.
            measured: What the folder's report says that its numbers cost; None if it says nothing.
        """
        self._config = config
        self._folder = folder
        self._limits = limits
        self._measured = measured
        self.ready: WorkerReady | None = None
        # Less than the model's context where the cache holds less.
        self.max_context_tokens = limits.max_model_len

    def describe(self) -> engine_pb2.EngineModel:
        """The model as it is known now; no blocks before the workers are ready."""
        config, ready = self._config, self.ready
        return engine_pb2.EngineModel(
            name=config.model_name or self._folder.name,
            revision=self._folder.revision,
            architecture=self._folder.config.architecture,
            parameter_count=self._folder.parameter_count,
            dtype=self._dtype(),
            vocabulary_size=self._limits.vocab_size,
            max_context_tokens=self.max_context_tokens,
            max_outputs=config.max_outputs,
            end_of_text_token_ids=self._limits.eos_token_ids,
            kv_block_tokens=config.block_size,
            kv_blocks=ready.num_blocks if ready else 0,
            device=self._device(),
            folder=str(self._folder.path),
            max_waiting_requests=config.max_waiting_requests,
            memory=_memory(ready.memory) if ready and ready.memory else None,
            quantization=_quantization(ready.quantization, self._measured) if ready and ready.quantization else None,
            kv_dtype=self._kv_dtype(),
            kv_bytes_per_token=self._kv_bytes_per_token(),
            drafter=config.speculate,
            max_drafts=config.tokens_per_row - 1,
        )

    @property
    def drafter(self) -> str:
        """Who drafts tokens that steps verify; "off": nobody."""
        return self._config.speculate

    def cost(self, ready: WorkerReady) -> ModelCost:
        """What the model's steps compute and read, all ranks together."""
        model, report = self._folder.config, ready.quantization or QuantizationReport()
        # What was not quantized has no bits of its own.
        layer_bits, head_bits = report.bits_per_weight or None, report.head_bits_per_weight or None
        return model_cost(model, self._dtype(), layer_bits, self._config.kv_dtype, head_bits, self._config.tp)

    def _kv_bytes_per_token(self) -> int:
        """Bytes of a token in all layers on each rank's device; 0: not known yet.

        In layers with a window it takes them until the window has passed it.
        """
        if self.ready is None or self.ready.memory is None:
            return 0
        return len(self._limits.cache_groups) * self.ready.memory.kv_block_bytes // self._config.block_size

    def _kv_dtype(self) -> str:
        return self._dtype() if self._config.kv_dtype == "auto" else self._config.kv_dtype

    def _device(self) -> str:
        """Rank 0's device; of several ranks, with their number over all stages."""
        if self.ready is None:
            return self._config.device
        return self.ready.device if self._config.num_ranks == 1 else f"{self.ready.device} x{self._config.num_ranks}"

    def _dtype(self) -> str:
        if self._config.dtype != "auto":
            return self._config.dtype
        on_cpu = self.ready is not None and self.ready.device.startswith("cpu")
        return "fp32" if on_cpu else _SHORT_DTYPES[self._folder.config.torch_dtype]


def _quantization(report: QuantizationReport, measured: MeasuredLoss | None) -> engine_pb2.EngineQuantization:
    return engine_pb2.EngineQuantization(
        scheme=report.scheme,
        group_size=report.group_size,
        bits_per_weight=report.bits_per_weight,
        mean_relative_error=report.mean_relative_error,
        worst_relative_error=report.worst_relative_error,
        worst_tensor=report.worst_tensor,
        head_scheme=report.head_scheme,
        head_bits_per_weight=report.head_bits_per_weight,
        head_relative_error=report.head_relative_error,
        activations=report.activations,
        measured=_measured_loss(measured) if measured else None,
    )


def _measured_loss(measured: MeasuredLoss) -> engine_pb2.EngineMeasuredLoss:
    return engine_pb2.EngineMeasuredLoss(
        method=measured.method,
        tokens=measured.tokens,
        perplexity_before=measured.perplexity_before,
        perplexity_after=measured.perplexity_after,
        divergence=measured.divergence,
        divergence_interval=measured.divergence_interval,
    )


def _memory(plan: MemoryPlan) -> engine_pb2.EngineMemory:
    return engine_pb2.EngineMemory(
        device_bytes=plan.device_bytes,
        total_bytes=plan.total_bytes,
        weight_bytes=plan.weight_bytes,
        activation_bytes=plan.activation_bytes,
        graph_bytes=plan.graph_bytes,
        other_bytes=plan.other_bytes,
        reserve_bytes=plan.reserve_bytes,
        kv_cache_bytes=plan.kv_cache_bytes,
        measured=plan.is_measured,
    )
