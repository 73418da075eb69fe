"""`headrace plan`: which ranks, weights and caches hold a model and its users.

It answers before any GPU is rented.

Owns flags, and the question to a process that knows the workers' arithmetic (it imports torch, and
this one does not). What users get of it is `capacity`'s and `tails`', the table `engine_table`'s.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import click
from click.core import ParameterSource

from headrace.local_server.installed import require_worker
from headrace.local_server.process import LocalServerError
from headrace_backend.draft_rules import unsuitable_eagle3, without_mtp
from headrace_hub.errors import HubRefused
from headrace_hub.resolve import Need, resolve
from headrace_model_folder import Eagle3Head, InvalidModelFolder, ModelConfig
from headrace_model_folder.bounded_files import parse_json_object
from headrace_model_folder.config import parse_config
from headrace_model_folder.families.eagle3 import is_eagle3, parse_eagle3
from headrace_model_folder.folder import has_own_output_layer
from headrace_supervisor.options import ServerCommand, files, model_argument, typed_model
from headrace_supervisor.plan.capacity import GPUS, PRODUCTS, Demand, Gpu, Prediction, RankSizes, predict
from headrace_supervisor.plan.engine_table import ANY, MOST_REPLICAS, print_engines
from headrace_supervisor.plan.fleet_table import Asked, fleet_rows, print_fleets
from headrace_supervisor.plan.tails import Spread, Tails, tails

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14_336},
    "llama-3.1-70b": _LLAMA
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28_672},
}
# click keeps the lines of a paragraph that begins with \b.
_EXAMPLES = """\b
Examples:
  headrace plan path/to/Llama-3.1-8B-Instruct --gpus 2 --users 200
  headrace plan --shape llama-3.1-70b --gpus 4 --users 1000 --quantize any
  headrace plan --shape llama-3.1-70b --users 1000 --target-answer-s 5
  headrace plan --shape llama-3.1-8b --fleet 10,100 --think-s 45
"""
_MOST_CONFIG_BYTES = 4 << 20
_RANKS = (1, 2, 4, 8)
# From what changes nothing to what takes least.
_QUANTIZE = ("off", "int8", "fp8", "int4", "nf4")
_KV_DTYPES = ("auto", "fp8", "int8")
_TIMEOUT_S = 300.0
# Fleets of one table, engines of one fleet, and the options that are for fleets alone.
_MOST_FLEETS = 8
_MOST_ENGINES = 10_000
_OF_FLEETS = ("shared_tokens", "prefixes", "lost_percent", "services", "card_hour")
# First tokens of a fleet come within so long, where nothing else is asked.
_FLEET_TTFT_MS = 1000.0
_TOKENS = click.IntRange(1, 1_000_000)


class _Number(click.FloatRange):
    """A range that "nan", which compares with nothing, is not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail("nan is no number", param, ctx)
        return number


class _Lengths(NamedTuple):
    """Tokens of a user's prompts and answers, on average."""

    prompt: int
    output: int


@click.command(cls=ServerCommand, context_settings={"help_option_names": ["--help", "-h"]}, epilog=_EXAMPLES)
@model_argument
@click.option("--shape", type=click.Choice(list(_SHAPES)), help="a known model, instead of MODEL")
@click.option(
    "--model",
    shell_complete=files,
    metavar="MODEL",
    help="model folder, or ORG/NAME of a hub, of which no weights are fetched",
)
@click.option("--gpu", type=click.Choice(list(GPUS)), default="h200", show_default=True, help="kind of GPU")
@click.option("--gpus", type=click.IntRange(1, 8), default=1, show_default=True, help="GPUs of one machine")
@click.option("--pp", type=click.IntRange(1, 8), default=1, show_default=True, help="pipeline stages of each engine")
@click.option("--expert-parallel", is_flag=True, help="ranks have whole experts of a mixture, not a part of each")
@click.option("--users", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="users in a closed loop")
@click.option("--prompt-tokens", type=_TOKENS, default=512, show_default=True, help="mean of a user's prompts")
@click.option("--output-tokens", type=_TOKENS, default=256, show_default=True, help="mean of the answers")
@click.option(
    "--prompt-spread",
    type=_Number(0, 3),
    default=0.0,
    show_default=True,
    help="deviation of the logarithm of prompts' lengths, as of headrace bench; 0: all have the mean",
)
@click.option("--output-spread", type=_Number(0, 3), default=0.0, show_default=True, help="the same for answers")
@click.option("--think-s", type=_Number(0, 86_400), default=0.0, help="mean seconds between answer and prompt")
@click.option("--target-itl-ms", type=_Number(0, 10_000, min_open=True), help="longest time between tokens")
@click.option(
    "--target-ttft-ms",
    type=_Number(0, 600_000, min_open=True),
    help=f"latest first token of 95 in 100; with --fleet {_FLEET_TTFT_MS:g} unless given",
)
@click.option("--target-answer-s", type=_Number(0, 86_400, min_open=True), help="longest answer of 95 in 100, whole")
@click.option(
    "--quantize",
    type=click.Choice([*_QUANTIZE, ANY]),
    default="off",
    show_default=True,
    help="bits of the weights; any: each",
)
@click.option(
    "--quantize-head",
    type=click.Choice(["off", "int8", "fp8"]),
    default="off",
    show_default=True,
    help="bits of the output layer",
)
@click.option(
    "--kv-dtype",
    type=click.Choice([*_KV_DTYPES, ANY]),
    default="auto",
    show_default=True,
    help="numbers of the KV cache; any: each",
)
@click.option(
    "--speculate",
    type=click.Choice(["off", "ngram", "suffix", "draft", "eagle", "mtp"]),
    default="off",
    show_default=True,
    help="who drafts tokens (draft, eagle: the model or head of --draft-model; mtp: the model's own MTP layer): counts "
    "the memory that it takes, not the steps that it saves",
)
@click.option("--max-model-len", type=click.IntRange(0), default=0, help="tokens of prompt and output; 0: the model's")
@click.option(
    "--draft-model",
    shell_complete=files,
    metavar="MODEL",
    help="model or EAGLE-3 head that drafts for it, as ranks would have it: memory counts both; times are of steps "
    "that settle one token a row",
)
@click.option("--fleet", metavar="COUNTS", help="numbers of engines, as 10,100,1000: simulates each behind services")
@click.option(
    "--shared-tokens",
    type=click.IntRange(0, 1_000_000),
    default=0,
    show_default=True,
    help="tokens of each prompt that are a shared beginning (--fleet)",
)
@click.option(
    "--prefixes",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="shared beginnings that there are (--fleet)",
)
@click.option(
    "--lost-percent",
    type=_Number(0, 50),
    default=1.0,
    show_default=True,
    help="engines that are lost at once; at least one unless 0 (--fleet)",
)
@click.option(
    "--services", type=click.IntRange(1, 64), default=4, show_default=True, help="services that route (--fleet)"
)
@click.option("--card-hour", type=_Number(0, 1e6, min_open=True), help="price of a card and hour (--fleet)")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
def plan(named_model: str | None, shape: str | None, model: str | None, as_json: bool, **options: Any) -> None:
    """Says which numbers of ranks hold a model and its users.

    MODEL is a folder, or ORG/NAME of a hub. Memory is as a worker would plan it, times are by rates
    that were measured. With any, it says which weights and caches, too.
    """
    config = _model_config(shape, typed_model(named_model, model))
    _check_lengths(config, options)
    if options["draft_model"] is not None:
        options["draft"] = _draft_config(config, options)
        options["speculate"] = "eagle" if is_eagle3(options["draft"]) else "draft"
    elif options["speculate"] in ("draft", "eagle"):
        what = "model" if options["speculate"] == "draft" else "head"
        _refuse(f"--speculate {options['speculate']} needs --draft-model, the {what} that drafts")
    elif options["speculate"] == "mtp" and (reason := without_mtp(parse_config(config))) is not None:
        _refuse(f"--speculate is mtp, and {reason}")
    if options["pp"] > options["gpus"]:
        _refuse(f"--pp is {options['pp']}, and each stage needs a GPU of the {options['gpus']} of --gpus")
    if options["pp"] > 1 and options["speculate"] != "off":
        _refuse(f"--speculate {options['speculate']} needs --pp 1: drafts are verified where one stage has all layers")
    if options["fleet"] is not None:
        _plan_fleets(config, options, as_json)
    if given := [_flag(name) for name in _OF_FLEETS if _is_given(name)]:
        _refuse(f"{given[0]} is for --fleet, which is not given")
    rows = _rows(config, options)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        print_engines(rows, options)
    sys.exit(0 if any(row["holds"] for row in rows) else 1)


def _plan_fleets(config: dict[str, Any], options: dict[str, Any], as_json: bool) -> NoReturn:
    """Answers for fleets, whose engines have as many ranks as --gpus allows, and exits."""
    counts = _fleet_counts(options["fleet"])
    if given := [_flag(name) for name in ("prompt_spread", "output_spread", "target_answer_s") if _is_given(name)]:
        _refuse(f"{given[0]} is for one machine; the simulation of --fleet has mean lengths")
    engines = _engines(options)
    if len(engines) > 1:
        _refuse("--fleet is for engines of one kind; name weights and cache instead of any")
    if options["pp"] > 1:
        _refuse("--fleet is for engines of one stage; its simulation does not know --pp")
    if options["shared_tokens"] >= options["prompt_tokens"]:
        _refuse(f"--shared-tokens is {options['shared_tokens']}; a prompt has {options['prompt_tokens']} tokens")
    gpu = GPUS[options["gpu"]]
    question = {"model": config, "engines": engines, "gpu_bytes": gpu.memory_bytes, "draft": options.get("draft")}
    [answer] = _asked(question | {"ranks": [max(tp for tp in _RANKS if tp <= options["gpus"])]})
    if answer["refused"]:
        _refuse(answer["refused"])
    asked = _fleet_asked(_rank_sizes(answer), gpu, options)
    rows = fleet_rows(asked, counts)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        print_fleets(asked, rows, options["gpu"], options["users"] if _is_given("users") else None)
    sys.exit(0 if any(row["holds"] for row in rows) else 1)


def _fleet_asked(sizes: RankSizes, gpu: Gpu, options: dict[str, Any]) -> Asked:
    lengths, target_itl_ms = _lengths(options), options["target_itl_ms"]
    return Asked(
        sizes,
        gpu,
        Demand(1, *lengths, options["think_s"], options["shared_tokens"]),
        options["services"],
        options["prefixes"],
        options["lost_percent"] / 100,
        (options["target_ttft_ms"] or _FLEET_TTFT_MS) / 1e3,
        target_itl_ms / 1e3 if target_itl_ms is not None else None,
        options["card_hour"],
    )


def _fleet_counts(text: str) -> list[int]:
    """Returns the numbers of engines in rising order."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        _refuse(f"--fleet is {text!r}; it is numbers of engines with commas between, as 10,100")
    if len(counts) > _MOST_FLEETS or counts[0] < 2 or counts[-1] > _MOST_ENGINES:
        _refuse(f"--fleet is {text!r}; it is at most {_MOST_FLEETS} numbers from 2 to {_MOST_ENGINES}")
    return counts


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _model_config(shape: str | None, model: str | None) -> dict[str, Any]:
    if (shape is None) == (model is None):
        _refuse("one of MODEL and --shape is needed")
    if shape is not None:
        return _SHAPES[shape]
    assert model is not None
    return _read_config(model, parse_config)


def _read_config(model: str, parse: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A model's or head's config.json, if `parse` takes it, untied if weights beside it are."""
    config: dict[str, Any]
    try:
        folder = resolve(model, Need.CONFIG).path
        with (folder / "config.json").open("rb") as file:
            config = parse_json_object(file.read(_MOST_CONFIG_BYTES), "config.json")
        parsed = parse(config)
        if isinstance(parsed, ModelConfig) and has_own_output_layer(folder, parsed):
            config["tie_word_embeddings"] = False
    except HubRefused as error:
        _refuse(str(error))
    except OSError as error:
        is_here = pathlib.Path(model).exists()
        _refuse(f"{model}/config.json: {error.strerror}" if is_here else f"there is no folder {model} here")
    except InvalidModelFolder as error:
        _refuse(f"{model}/{error}")
    except (ValueError, TypeError) as error:
        _refuse(f"{model}/config.json: {error}")
    return config


def _parse_draft(config: dict[str, Any]) -> ModelConfig | Eagle3Head:
    return parse_eagle3("config.json", config) if is_eagle3(config) else parse_config(config)


def _draft_config(config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the draft model or head, if it suits the model."""
    if options["pp"] > 1:
        _refuse(f"--draft-model is for engines of one stage, and --pp is {options['pp']}")
    draft = _read_config(options["draft_model"], _parse_draft)
    kind = "eagle" if is_eagle3(draft) else "draft"
    if _is_given("speculate") and options["speculate"] != kind:
        _refuse(f"--draft-model is for --speculate {kind}, and --speculate is {options['speculate']}")
    drafted, model = _parse_draft(draft), parse_config(config)
    if isinstance(drafted, Eagle3Head):
        if (reason := unsuitable_eagle3(drafted, model)) is not None:
            _refuse(f"--draft-model {reason}")
        return draft
    if drafted.vocab_size != model.vocab_size:
        _refuse(f"--draft-model has a vocabulary of {drafted.vocab_size} tokens, and the model of {model.vocab_size}")
    longest = options["max_model_len"] or model.max_position_embeddings
    if drafted.max_position_embeddings < longest:
        _refuse(
            f"--draft-model has a context of {drafted.max_position_embeddings} tokens, and sequences up to {longest}"
        )
    return draft


def _check_lengths(config: dict[str, Any], options: dict[str, Any]) -> None:
    """What a server would not start with, and requests that it would refuse, are no plan."""
    context = parse_config(config).max_position_embeddings
    if options["max_model_len"] > context:
        _refuse(f"--max-model-len is {options['max_model_len']}; the model's context has {context} tokens")
    lengths, longest = _lengths(options), options["max_model_len"] or context
    if sum(lengths) > longest:
        _refuse(
            f"prompts of {lengths.prompt} tokens and answers of {lengths.output} are {sum(lengths)}, and a request has "
            f"at most {longest}"
        )


def _lengths(options: dict[str, Any]) -> _Lengths:
    return _Lengths(options["prompt_tokens"], options["output_tokens"])


def _engines(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The engines to ask about: of each kind of weights, each kind of cache."""
    weights = _QUANTIZE if options["quantize"] == ANY else (options["quantize"],)
    caches = _KV_DTYPES if options["kv_dtype"] == ANY else (options["kv_dtype"],)
    names = ("quantize_head", "speculate", "draft_model", "max_model_len", "pp", "expert_parallel")
    shared = {name: options[name] for name in names} | {"load": "dummy"}
    return [
        shared | {"quantize": quantize, "kv_dtype": kv_dtype}
        for quantize, kv_dtype in itertools.product(weights, caches)
    ]


def _rows(config: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per engine and number of ranks."""
    gpu, gpus = GPUS[options["gpu"]], options["gpus"]
    question = {"model": config, "engines": _engines(options), "gpu_bytes": gpu.memory_bytes}
    question |= {"draft": options.get("draft"), "ranks": [tp for tp in _RANKS if tp * options["pp"] <= gpus]}
    spread = _spread(config, options)
    rows = []
    for answer in _asked(question):
        row = answer | {"replicas": gpus // (answer["tp"] * answer["pp"]), "holds": False}
        if not answer["refused"]:
            sizes = _rank_sizes(answer)
            found, waits = _engine(sizes, gpu, row["replicas"], spread, options)
            row |= _shown(found) | _shown_tails(waits, row["replicas"]) | {"holds": _holds(found, waits, options)}
            if not row["holds"] and (options["target_answer_s"] or options["target_ttft_ms"]):
                row["enough_replicas"] = _enough_replicas(sizes, gpu, row["replicas"], spread, options)
        rows.append(row)
    return rows


def _spread(config: dict[str, Any], options: dict[str, Any]) -> Spread:
    longest = options["max_model_len"] or parse_config(config).max_position_embeddings
    return Spread(options["prompt_spread"], options["output_spread"], longest)


def _engine(
    sizes: RankSizes, gpu: Gpu, replicas: int, spread: Spread, options: dict[str, Any]
) -> tuple[Prediction, Tails | None]:
    """What one of so many engines does for its share of the users.

    It has no tails where users wait for each other.
    """
    demand = Demand(-(-options["users"] // replicas), *_lengths(options), options["think_s"])
    found = predict(sizes, gpu, demand)
    return found, None if found.is_overloaded else tails(sizes, gpu, demand, spread, found)


def _enough_replicas(sizes: RankSizes, gpu: Gpu, replicas: int, spread: Spread, options: dict[str, Any]) -> int | None:
    """The fewest engines, more than there are, that keep to what is asked.

    None: no number does that is tried.
    """
    low, high = replicas, min(MOST_REPLICAS, int(options["users"]))
    if high <= low or not _holds(*_engine(sizes, gpu, high, spread, options), options):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        holds = _holds(*_engine(sizes, gpu, middle, spread, options), options)
        low, high = (low, middle) if holds else (middle, high)
    return high


def engine_sizes(shape: str, engine: dict[str, Any], gpu: Gpu) -> RankSizes:
    """Returns the sizes of what one rank of an engine has of a known model.

    Args:
        shape: The model.
        engine: Fields of EngineConfig, `tp` and `quantize` among them.
        gpu: The card of each rank.

    Raises:
        ValueError: There can be no such engine; says why.
    """
    question = {"model": _SHAPES[shape], "engines": [engine], "gpu_bytes": gpu.memory_bytes, "ranks": [engine["tp"]]}
    [answer] = _asked(question)
    if answer["refused"]:
        raise ValueError(answer["refused"])
    return _rank_sizes(answer)


def _asked(question: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer of the process that knows, which imports torch."""
    try:
        require_worker()
    except LocalServerError as error:
        _refuse(str(error))
    command = [sys.executable, "-m", "headrace_backend.worker.start_up.plan_sizes"]
    done = subprocess.run(
        command, input=json.dumps(question), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        _refuse((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def _rank_sizes(answer: dict[str, Any]) -> RankSizes:
    names: tuple[str, ...] = ("token_bytes", "read_bytes", "multiplied", "kv_token_bytes", "kv_tokens", "max_num_seqs")
    names += ("expert_bytes", "expert_share", "kv_windows", "row_state_bytes", "num_layers")
    named: dict[str, Any] = {name: answer[name] for name in names}
    products = PRODUCTS[answer["quantize"]]
    ranks = {"tp": answer["tp"], "pp": answer["pp"]}
    return RankSizes(products=products, **ranks, **named)


def _shown(found: Prediction) -> dict[str, Any]:
    return {
        "rows_held": found.rows_held,
        "active": round(found.active, 1),
        "itl_ms": round(found.itl_ms, 2),
        "answer_s": round(found.answer_s, 2),
        "overloaded": found.is_overloaded,
    }


def _shown_tails(waits: Tails | None, replicas: int) -> dict[str, Any]:
    if waits is None:
        return {}
    return {
        "ttft_p50_ms": round(waits.ttft_p50_s * 1e3, 1),
        "ttft_p95_ms": round(waits.ttft_p95_s * 1e3, 1),
        "answer_p50_s": round(waits.answer_p50_s, 2),
        "answer_p95_s": round(waits.answer_p95_s, 2),
        "output_tokens_per_s": round(waits.tokens_per_s * replicas, 1),
        "simulated_answers": waits.answers,
    }


def _holds(found: Prediction, waits: Tails | None, options: dict[str, Any]) -> bool:
    """Whether nobody waits for another's end, and times are as asked."""
    if found.is_overloaded:
        return False
    itl_ms, ttft_ms, answer_s = (options[name] for name in ("target_itl_ms", "target_ttft_ms", "target_answer_s"))
    if itl_ms is not None and found.itl_ms > itl_ms:
        return False
    if waits is None:
        return ttft_ms is None and answer_s is None
    in_time = ttft_ms is None or waits.ttft_p95_s * 1e3 <= ttft_ms
    return in_time and (answer_s is None or waits.answer_p95_s <= answer_s)


def _refuse(reason: str) -> NoReturn:
    click.echo(f"headrace: {reason}", err=True)
    sys.exit(2)
