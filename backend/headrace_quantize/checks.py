"""Refuses what can be refused before torch is loaded: folders, sizes, names of layers.

No torch.

Owns the rules and their words, each one line that names flag, rule and limit. The command line asks
here before it starts the process; the process asks again, for what it finds.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import os
import pathlib

from headrace_model_folder import InvalidModelFolder, ModelFolder
from headrace_model_folder.bounded_files import read_json_object
from headrace_model_folder.config import CONFIG_FILE
from headrace_model_folder.measured_loss import REPORT_FILE
from headrace_quantize.config import GROUP_SIZES, QuantizeConfig

STATE_FILE = "quantization-state.json"
# Ends the name of a file that is not whole yet.
TEMPORARY = ".partial"
_CONFIG_LIMIT = 4 << 20


class QuantizeRefused(ValueError):
    """Can't be done as asked. The message is one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A request that its folders allow."""

    config: QuantizeConfig
    model: ModelFolder
    out: pathlib.Path
    # Names of projections, without ".weight", in the order of layers.
    quantized: tuple[str, ...]
    kept: tuple[str, ...]


def check(config: QuantizeConfig) -> Job:
    """Everything that the folders and sizes say.

    Raises:
        QuantizeRefused: MODEL_FOLDER is none, is quantized already or has no tokenizer for the
            text; groups do not divide; a pattern fits no layer; a text is missing or empty;
            OUT_FOLDER is in use.
    """
    model = _open(config)
    if config.has_text and config.sequence_length > model.config.max_position_embeddings:
        raise QuantizeRefused(
            f"--sequence-length is {config.sequence_length}, the model's context has "
            f"{model.config.max_position_embeddings} tokens"
        )
    shapes = projections(model)
    kept = _kept(config.keep, tuple(shapes))
    stays = frozenset(kept)
    quantized = tuple(name for name in shapes if name not in stays)
    if not quantized:
        raise QuantizeRefused(f"--keep fits all {len(kept)} layers, so that nothing would be quantized")
    _check_experts(model, stays)
    _check_groups(config, {name: shapes[name][1] for name in quantized})
    for file in config.calibration:
        _check_text("--calibration", file)
    if config.evaluation is not None:
        _check_text("--evaluation", config.evaluation)
    return Job(config, model, _checked_out(config, model), quantized, kept)


def projections(model: ModelFolder) -> dict[str, tuple[int, int]]:
    """Name of each projection of the decoder layers -> [outputs, inputs], as the folder has them.

    Routers and others that keep the model's type are left out.
    """
    linears = (linear.stored for linear in model.config.description.linears if not linear.keeps_dtype)
    return {linear.name: (linear.outputs, linear.inputs) for linear in linears}


def plain_projections(model: ModelFolder) -> tuple[str, ...]:
    """Names of the projections that keep the model's type: routers, gates, logits of decay."""
    return tuple(linear.name for linear in model.config.description.linears if linear.keeps_dtype)


def _open(config: QuantizeConfig) -> ModelFolder:
    try:
        folder = pathlib.Path(config.model_folder)
        if folder.is_dir() and read_json_object(folder, CONFIG_FILE, _CONFIG_LIMIT).get("quantization_config"):
            raise QuantizeRefused(
                f"MODEL_FOLDER {folder} is quantized already: {CONFIG_FILE} has a quantization_config"
            )
        model = ModelFolder.open(folder)
    except InvalidModelFolder as error:
        raise QuantizeRefused(f"MODEL_FOLDER: {error}") from None
    fused = next((linear.fused.name for linear in model.config.description.linears if linear.fused), None)
    if config.method == "awq" and fused is not None:
        raise QuantizeRefused(
            f"--method awq is not for {model.config.architecture}, which keeps several projections in one tensor "
            f"({fused}), of which scales could be folded into one alone; rtn and gptq work"
        )
    if any(experts.stacked is not None for experts in model.config.description.expert_layers):
        raise QuantizeRefused(
            f"MODEL_FOLDER {folder} is of {model.config.architecture}, which keeps all experts of a layer in one "
            "tensor, for which compressed-tensors has no layout that is read here: --quantize of a server rounds such "
            "a model as it loads"
        )
    if config.method == "awq" and model.config.description.expert_layers:
        raise QuantizeRefused(
            "--method awq is not for mixtures of experts, all of which would share the scales of their inputs; rtn and "
            "gptq work"
        )
    if config.method == "awq" and not model.config.description.is_plain:
        raise QuantizeRefused(
            f"--method awq is not for {model.config.architecture}, whose norms are not all before products, where "
            "scales of inputs could be folded into them; rtn and gptq work"
        )
    described = model.config.description
    if not described.has_one_geometry or any(layer.scalar is not None for layer in described.layers):
        raise QuantizeRefused(
            f"MODEL_FOLDER {folder} is of {model.config.architecture}, whose layers differ in their heads or "
            "scale the stream, which is not supported yet: --quantize of a server rounds such a model as it loads"
        )
    if model.gguf_file is not None:
        raise QuantizeRefused(
            f"MODEL_FOLDER {folder} is a GGUF file, whose weights have their own bits: a folder is needed"
        )
    if config.has_text and model.tokenizer_path is None:
        raise QuantizeRefused(f"MODEL_FOLDER {folder} has no tokenizer.json, which --calibration and --evaluation need")
    return model


def _kept(patterns: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that a pattern fits, whole or from one of their dots on."""
    fitting: set[str] = set()
    for pattern in patterns:
        found = {n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*.{pattern}")}
        if not found:
            short = sorted({name.rpartition(".")[2] for name in names})
            near = difflib.get_close_matches(pattern, [*names, *short], n=1, cutoff=0.0)[0]
            raise QuantizeRefused(f"--keep {pattern} fits no layer; the nearest name is {near}")
        fitting |= found
    return tuple(name for name in names if name in fitting)


def _check_experts(model: ModelFolder, kept: frozenset[str]) -> None:
    for names in model.config.description.expert_products:
        own = [name for name in names if name in kept]
        if own and len(own) < len(names):
            other = next(name for name in names if name not in kept)
            raise QuantizeRefused(
                f"--keep fits {own[0]} and not {other}: experts of one layer are multiplied together, so that all "
                "gates and ups of a layer are kept or none, and alike its down projections"
            )


def _check_groups(config: QuantizeConfig, inputs: dict[str, int]) -> None:
    group = config.group
    for name, count in inputs.items():
        if group is not None and count % group:
            fitting = [size for size in GROUP_SIZES if all(number % size == 0 for number in inputs.values())]
            works = f"--group-size {fitting[-1] if fitting else 'channel'} works"
            raise QuantizeRefused(
                f"--group-size is {group}, which does not divide the {count} inputs of {name}; {works}"
            )


def _check_text(flag: str, file: str) -> None:
    path = pathlib.Path(file)
    if not path.is_file():
        raise QuantizeRefused(f"{flag}: no file {file}")
    if not path.stat().st_size:
        raise QuantizeRefused(f"{flag}: {file} is empty")


def _checked_out(config: QuantizeConfig, model: ModelFolder) -> pathlib.Path:
    out = pathlib.Path(config.out_folder)
    if out.exists() and not out.is_dir():
        raise QuantizeRefused(f"OUT_FOLDER {out} is not a folder")
    # The nearest folder that is there already: those below it are made.
    base = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        why = "can't be written" if base.is_dir() else "is not a folder"
        raise QuantizeRefused(f"OUT_FOLDER {out} can't be made: {base} {why}")
    if out.resolve().is_relative_to(model.path):
        raise QuantizeRefused(f"OUT_FOLDER {out} lies in MODEL_FOLDER")
    entries = {path.name for path in out.iterdir()} if out.exists() else set()
    # All that a run leaves that was killed before it wrote anything.
    entries -= {STATE_FILE + TEMPORARY}
    if STATE_FILE in entries and not config.resume:
        raise QuantizeRefused(f"OUT_FOLDER {out} holds an unfinished run; --resume goes on with it")
    if entries and not entries & {STATE_FILE, REPORT_FILE}:
        raise QuantizeRefused(f"OUT_FOLDER {out} is not empty")
    if REPORT_FILE in entries and not config.resume:
        raise QuantizeRefused(f"OUT_FOLDER {out} holds a finished run")
    return out
