"""Everything the service knows of the model it fronts: text in, text out, names and limits.

Owns the join of two sources: the model folder (tokenizer, token table, chat template, sampling
defaults) and what the engine says of itself (context, outputs, end-of-text tokens). Loaded when the
engine's connection says welcome; one object until a welcome says otherwise.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib

from headrace.v1 import generation_pb2, inference_pb2
from headrace_model_folder import GenerationDefaults, InvalidModelFolder, ModelFolder
from headrace_model_folder import TokenTable as FolderTokenTable
from headrace_model_folder.token_table import library_tokenizer
from headrace_protos.engine.v1 import engine_pb2
from headrace_request import limits
from headrace_request.rule_kinds import Bounds
from headrace_service.output_forms.model_form import ModelForm
from headrace_service.resolved_spec import ModelFacts
from headrace_service.text.default_sampling import default_sampling, not_followed
from headrace_service.text.detokenizer import PieceTable
from headrace_service.text.tokenization import Tokenizer

# Normalizers may shrink a text a little before it is cut into tokens; no text beyond this many
# times the plain bound can fit.
_NORMALIZER_SLACK = 4


@dataclasses.dataclass(frozen=True, slots=True)
class TextModel:
    """The model of this service.

    Attributes:
        engine: what the engine said of itself.
        facts: what validation needs.
        tokenizer: text to ids.
        pieces: ids to text.
        chat_template: Jinja source; None if the folder has none.
        template_tokens: special tokens that the template may name, such as bos_token.
        form: what outputs of its conversations are made of.
        not_followed: a line for each recommendation of generation_config.json that requests get
            otherwise, or not at all.
    """

    engine: engine_pb2.EngineModel
    facts: ModelFacts
    tokenizer: Tokenizer
    pieces: PieceTable
    chat_template: str | None
    template_tokens: dict[str, str]
    form: ModelForm
    not_followed: tuple[str, ...]

    @classmethod
    def load(
        cls,
        engine: engine_pb2.EngineModel,
        folder_path: pathlib.Path | None,
        max_text_bytes: int,
        threads: concurrent.futures.Executor,
        tool_format: str = "auto",
    ) -> TextModel:
        """Reads what the service needs of the folder; never its weights.

        Args:
            engine: the engine's own description, whose folder is read unless another is given.
            folder_path: a folder of the same model on this machine.
            max_text_bytes: longest text that is encoded.
            threads: where long texts are encoded.
            tool_format: how the model writes calls of functions; "auto": as its template says.

        Raises:
            InvalidModelFolder: the folder is missing, invalid, or without tokenizer.
        """
        folder = ModelFolder.open(folder_path or pathlib.Path(engine.folder), require_weights=False)
        table = folder.token_table
        if table is None:
            raise InvalidModelFolder(f"{folder.path}: has no {folder.tokenizer_name}, which a service needs")
        pieces = piece_table(table, engine.vocabulary_size)
        tokenizer = library_tokenizer(folder.tokenizer_json())
        form = ModelForm.of(
            folder.chat_template,
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            table.special_ids,
            tool_format,
        )
        facts = _facts(engine, pieces, folder.generation_defaults, max_text_bytes)
        return cls(
            engine=engine,
            facts=dataclasses.replace(facts, reasons=form.section is not None, takes_effort=form.takes_effort),
            tokenizer=Tokenizer(tokenizer, threads),
            pieces=pieces,
            chat_template=folder.chat_template,
            template_tokens=dict(folder.template.special_tokens),
            form=form,
            not_followed=not_followed(folder.generation_defaults),
        )

    def described_anew(self, engine: engine_pb2.EngineModel) -> TextModel | None:
        """Returns this model with what else the engine says of it (its cache, after a restart).

        None if it is not about this model.
        """
        of_text = ("name", "revision", "folder", "vocabulary_size", "max_context_tokens", "max_outputs", "max_drafts")
        if any(getattr(self.engine, field) != getattr(engine, field) for field in of_text):
            return None
        return dataclasses.replace(self, engine=engine)

    def describe(self) -> inference_pb2.Model:
        """Returns the model as GetModel reports it."""
        engine, defaults = self.engine, self.facts.defaults
        return inference_pb2.Model(
            name=engine.name,
            revision=engine.revision,
            architecture=engine.architecture,
            parameter_count=engine.parameter_count,
            dtype=engine.dtype,
            vocabulary_size=engine.vocabulary_size,
            max_context_tokens=engine.max_context_tokens,
            max_outputs=min(limits.MAX_OUTPUTS, engine.max_outputs),
            end_of_text_token_ids=engine.end_of_text_token_ids,
            has_chat_template=self.chat_template is not None,
            default_sampling=generation_pb2.SamplingParameters(
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
                presence_penalty=defaults.presence_penalty,
                frequency_penalty=defaults.frequency_penalty,
            ),
            kv_block_tokens=engine.kv_block_tokens,
            kv_blocks=engine.kv_blocks,
            device=engine.device,
            memory_plan=_memory_plan(engine.memory) if engine.HasField("memory") else None,
            quantization=_quantization(engine.quantization) if engine.HasField("quantization") else None,
            kv_dtype=engine.kv_dtype,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            drafter=engine.drafter,
            max_drafts=engine.max_drafts,
            not_followed=self.not_followed,
            tool_format=self.form.call_format,
            reasoning=self.form.section is not None,
            reasoning_effort=self.form.takes_effort,
        )


def _quantization(report: engine_pb2.EngineQuantization) -> inference_pb2.Quantization:
    return inference_pb2.Quantization(
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
        measured=_measured_loss(report.measured) if report.HasField("measured") else None,
    )


def _measured_loss(measured: engine_pb2.EngineMeasuredLoss) -> inference_pb2.MeasuredLoss:
    return inference_pb2.MeasuredLoss(
        method=measured.method,
        tokens=measured.tokens,
        perplexity_before=measured.perplexity_before,
        perplexity_after=measured.perplexity_after,
        divergence=measured.divergence,
        divergence_interval=measured.divergence_interval if measured.HasField("divergence_interval") else None,
    )


def _memory_plan(memory: engine_pb2.EngineMemory) -> inference_pb2.MemoryPlan:
    return inference_pb2.MemoryPlan(
        device_bytes=memory.device_bytes,
        total_bytes=memory.total_bytes,
        weight_bytes=memory.weight_bytes,
        activation_bytes=memory.activation_bytes,
        graph_bytes=memory.graph_bytes,
        other_bytes=memory.other_bytes,
        reserve_bytes=memory.reserve_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        measured=memory.measured,
    )


def piece_table(table: FolderTokenTable, vocabulary_size: int) -> PieceTable:
    """Returns a folder's tokens as the detokenizer has them."""
    return PieceTable(
        table.token_bytes,
        table.special_ids,
        table.strips_leading_space,
        vocabulary_size,
        fallback_ids=table.fallback_ids,
        beginnings=table.beginnings,
    )


def _facts(
    engine: engine_pb2.EngineModel, pieces: PieceTable, folder_defaults: GenerationDefaults, max_text_bytes: int
) -> ModelFacts:
    return ModelFacts(
        name=engine.name,
        bounds=Bounds(
            engine.vocabulary_size, engine.max_context_tokens, engine.max_outputs, max_drafts=engine.max_drafts
        ),
        max_text_bytes=min(max_text_bytes, engine.max_context_tokens * pieces.max_piece_bytes * _NORMALIZER_SLACK),
        defaults=default_sampling(folder_defaults),
    )
