"""Which engine a benchmark measures: command-line options, and what they come to on this device.

Owns the options that `bench_engine`, `bench_serving` and `bench_ladder` share, and the refusal of
mistakes before anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import time
from typing import Any

import msgspec
import pydantic

from benchmarks.shapes import SHAPES, Shape, shape_of, write_model_folder
from benchmarks.weight_files import FORMATS, write_weights
from benchmarks.workloads import THINK_SECONDS, USERS_SECONDS, build
from headrace_backend.config import QUANTIZE_GROUPS, EngineConfig

# Making the weights of a large model takes minutes on a slow host.
START_TIMEOUT_S = 900.0
_LIMIT_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, on what."""

    settings: dict[str, Any]
    # What the settings come to on this device.
    engine: EngineConfig
    shape: Shape
    shape_name: str
    workloads: tuple[str, ...]
    seed: int
    # 0: all requests on a GPU, a few on a CPU.
    requests: int
    # 0: as many as a workload is worth.
    repeats: int
    # How long users1000 goes on.
    seconds: float
    # How long its users think on average; 0: as much shorter as the whole is.
    think_s: float
    git: str


def engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which engine is measured with workloads.

    Benchmarks beside this one share them.
    """
    which_engine(parser)
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        help="the first N of each workload, N users of users1000; 0: all (16 on a CPU)",
    )
    parser.add_argument(
        "--seconds", type=float, default=USERS_SECONDS, help="how long users1000 goes on; people think as much shorter"
    )
    parser.add_argument(
        "--think-s",
        type=float,
        default=0.0,
        help=(
            f"how long they think instead, on average; {THINK_SECONDS:g} with fewer --seconds is the beginning of the "
            "whole"
        ),
    )
    parser.add_argument("--repeats", type=int, default=0, help="runs of each workload; 0: the benchmark's own number")


def which_engine(parser: argparse.ArgumentParser) -> None:
    """The options that say which engine it is, and where the result goes."""
    parser.add_argument(
        "--shape", choices=SHAPES, default="demo", help="architecture; its folder is made, without weights"
    )
    parser.add_argument("--model", type=pathlib.Path, help="a model folder instead of a shape")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    parser.add_argument("--quant", choices=("int8", "int4", "fp8", "nf4"), help="bits of the layers' weights")
    parser.add_argument("--quant-group", type=int, choices=QUANTIZE_GROUPS, help="inputs that share a scale, of int4")
    parser.add_argument("--quant-head", choices=("int8", "fp8"), help="bits of the output layer's weight")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8", "int8"), default="auto", help="numbers of the KV cache")
    parser.add_argument(
        "--load",
        choices=("dummy", "folder"),
        default="",
        help="default: dummy for a shape, folder for --model; a shape with folder gets files of dummy weights",
    )
    parser.add_argument(
        "--files",
        choices=FORMATS,
        default=FORMATS[0],
        help=(
            "layers' numbers in files of dummy weights (in TMPDIR); fp8 as compressed-tensors has it, fp8_blocks as "
            "quant_method fp8 in blocks"
        ),
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:INDEX")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model, one GPU each")
    parser.add_argument("--rows", type=int, default=0, help="sequences of a batch (max_num_seqs); 0: the default")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the worker")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=JSON", help="another EngineConfig field; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="added to the workloads' own seeds")
    parser.add_argument("--git", default="", help="the commit, where the tree has no history")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument(
        "--limit-s",
        type=positive_seconds,
        default=_LIMIT_S,
        help=(
            "wall time of the whole; then, as on SIGTERM and SIGINT, what was measured is written and marked "
            "incomplete (default %(default)g)"
        ),
    )


def positive_seconds(text: str) -> float:
    """Seconds above 0, of an option."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, is {text}")
    return seconds


def model_folder(options: argparse.Namespace, parent: pathlib.Path, *, tokenizer: bool = False) -> pathlib.Path:
    """The folder that the options name, or one that is made for their shape below `parent`."""
    if options.model:
        return pathlib.Path(options.model)
    folder = write_model_folder(options.shape, parent, tokenizer=tokenizer)
    if options.load == "folder":
        began = time.monotonic()
        num_bytes = write_weights(folder, layers=options.files)
        print(f"wrote {num_bytes / 1e9:.1f} GB of dummy weights in {time.monotonic() - began:.1f} s", flush=True)
    return folder


def plan_of(parser: argparse.ArgumentParser, options: argparse.Namespace, folder: pathlib.Path) -> Plan:
    """What the options ask for, on the model in `folder`.

    Mistakes end the program as argparse's own do.
    """
    names = tuple(options.workloads.split(","))
    try:
        for name in names:
            build(name, requests=1)
        if not 0 < options.seconds <= USERS_SECONDS:
            raise ValueError(f"--seconds must be above 0 and at most {USERS_SECONDS:g}, is {options.seconds:g}")
        if not 0 <= options.think_s <= USERS_SECONDS:
            raise ValueError(f"--think-s must be from 0 to {USERS_SECONDS:g}, is {options.think_s:g}")
    except ValueError as error:
        parser.error(str(error))
    settings = engine_settings(options, folder.resolve())
    config = checked_config(parser, settings)
    shape_name = options.model.name if options.model else options.shape
    sizes = (options.seed, options.requests, options.repeats, options.seconds, options.think_s)
    return Plan(settings, config, shape_of(folder), shape_name, names, *sizes, options.git)


def checked_config(parser: argparse.ArgumentParser, settings: dict[str, Any]) -> EngineConfig:
    """What settings come to on this device. A mistake ends the program as argparse's own do."""
    try:
        return EngineConfig(**settings)
    except pydantic.ValidationError as error:
        parser.error(f"{'.'.join(map(str, error.errors()[0]['loc']))}: {error.errors()[0]['msg']}")


def engine_settings(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """EngineConfig fields of the options."""
    load = options.load or ("folder" if options.model else "dummy")
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": options.device,
        "tp": options.tp,
        "dtype": options.dtype,
        "kv_dtype": options.kv_dtype,
        "load": load,
        "worker_threads": options.threads,
        "max_waiting_requests": 4096,
        "start_timeout_s": START_TIMEOUT_S,
    }
    if options.quant:
        settings["quantize"] = options.quant
    if options.quant_group:
        settings["quantize_group"] = options.quant_group
    if options.quant_head:
        settings["quantize_head"] = options.quant_head
    if options.rows:
        settings["max_num_seqs"] = options.rows
    for assignment in options.set:
        name, _, value = assignment.partition("=")
        settings[name] = _json_or_text(value)
    return settings


def _json_or_text(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
