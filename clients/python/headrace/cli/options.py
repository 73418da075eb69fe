"""Options that commands share: where the server is, how to print, how to generate.

Owns the command line's side of ConnectionOptions and of GenerationOptions, the latter in one table
that `--help`, the parsing and the chat's /set all read. Values go from the command line to the
client's keyword arguments.
"""

from __future__ import annotations

import functools
import math
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from headrace.admin import AdminClient
from headrace.cli.failures import FACTS_KEY, CallFacts, os_sentence
from headrace.cli.help import SectionedOption
from headrace.client import Client
from headrace.connections.channel import RetryPolicy
from headrace.connections.connection import DEFAULT_SERVER, ConnectionOptions, PlaintextKey
from headrace.security import Tls
from headrace.spec import EARLY_STOPPING, BeamSearch, EarlyStoppingName, GenerationOptions, path_of

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
ONCE = RetryPolicy(max_attempts=1)
_FILE = click.Path(dir_okay=False)
_CONNECTION = "Connection"
# Field of Tls -> option.
_TLS_FIELDS = {"ca": "ca", "certificate": "client_certificate", "key": "client_key", "server_name": "server_name"}


class TokenIdList(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated token ids."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The ids of a string such as "1,2,3"."""
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a comma-separated list of token ids", param, ctx)


class LogitBias(click.ParamType):  # type: ignore[type-arg]
    """A token id and what is added to its logit."""

    name = "id=bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """The pair of a string such as "42=-5"."""
        if isinstance(value, tuple):
            return value
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not of the form TOKEN_ID=BIAS", param, ctx)


class TextOrFile(click.ParamType):  # type: ignore[type-arg]
    """A text, or the file that holds it."""

    name = "text|@file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, or what the file behind "@" holds."""
        if not value.startswith("@"):
            return str(value)
        try:
            return pathlib.Path(value[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            self.fail(f"{value[1:]!r} can't be read: {getattr(error, 'strerror', None) or error}", param, ctx)


# What follows the width, where it is left out.
_BEAM_DEFAULTS = ("1", "heuristic")


class BeamOptions(click.ParamType):  # type: ignore[type-arg]
    """The options of a beam search: its width, then what else there is of them."""

    name = "width[,penalty[,when]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> BeamSearch:
        """The search of a string such as "4" or "4,0.5,never"."""
        if isinstance(value, BeamSearch):
            return value
        width, penalty, when = [*value.split(","), *_BEAM_DEFAULTS[value.count(",") :]][:3]
        try:
            if value.count(",") > 2 or when not in EARLY_STOPPING:
                raise ValueError
            return BeamSearch(int(width), float(penalty), cast(EarlyStoppingName, when))
        except ValueError:
            names = ", ".join(EARLY_STOPPING)
            self.fail(f"{value!r} is not of the form WIDTH[,PENALTY[,WHEN]], WHEN one of {names}", param, ctx)


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """A length of time in seconds, above 0."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds of a string such as "0.5"."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is not a number of seconds above 0", param, ctx)
        return seconds


def _option(name: str, kind: Any, text: str, *, flags: tuple[str, ...] = (), many: bool = False) -> click.Option:
    declared = flags or ("--" + name.replace("_", "-"),)
    return SectionedOption(
        [*declared, name], type=kind, help=text, multiple=many, default=None, section="Model, sampling and stop"
    )


# Ranges and defaults are the model's and the server's; the texts repeat what the protos say.
GENERATION_OPTIONS: dict[str, click.Option] = {
    str(option.name): option
    for option in (
        _option("model", str, "Name of the model. Default: the server's."),
        _option("max_tokens", int, "Most tokens per output. Default: what the context leaves."),
        _option("temperature", float, "0 is greedy; 0.01 to 100. Default: the model's, else 1."),
        _option("top_p", float, "Nucleus: above 0, to 1. Default: the model's, else 1."),
        _option("top_k", int, "Keep this many of the most likely tokens; 0 keeps all. Default: the model's, else 0."),
        _option("min_p", float, "Least probability relative to the most likely token, 0 to 1. Default: 0."),
        _option(
            "top_n_sigma", float, "Keep logits so many standard deviations from the highest, 0 to 100. Default: 0."
        ),
        _option("repetition_penalty", float, "0.01 to 10. Default: the model's, else 1 (none)."),
        _option("presence_penalty", float, "-2 to 2. Default: 0."),
        _option("frequency_penalty", float, "-2 to 2. Default: 0."),
        _option("seed", int, "Seed of the sampling noise. Default: drawn by the server."),
        _option("logit_bias", LogitBias(), "Added to a token's logit, -100 to 100. May be repeated.", many=True),
        _option("stop", str, "Ends the output before this string. May be repeated.", many=True),
        _option("stop_token_ids", TokenIdList(), "Ends the output at one of these tokens."),
        _option("min_tokens", int, "Fewest tokens per output. Default: 0."),
        _option(
            "ignore_eos",
            bool,
            "Go on past the model's end-of-text tokens. Default: stop there.",
            flags=("--ignore-eos/--no-ignore-eos",),
        ),
        _option("bad_words", str, "A word that is never generated. May be repeated.", flags=("--bad-word",), many=True),
        _option(
            "include_stop_string",
            bool,
            "Keep a matched stop string in the text. Default: drop it.",
            flags=("--include-stop-string/--no-include-stop-string",),
        ),
        _option("n", int, "Outputs sampled in parallel, 1 to 128. Default: 1.", flags=("-n", "--outputs")),
        _option("logprobs", int, "Report this many likely tokens beside each one (0 to 20; see --json)."),
        _option("priority", int, "Higher runs first, -100 to 100. Default: 0."),
        _option("time_limit", float, "Seconds from acceptance to the last token. Default: none, or the server's."),
        _option("cache_salt", str, "Share cached prefixes only with requests of the same salt."),
        _option(
            "skip_special_tokens",
            bool,
            "Leave special tokens out of the text. Default: skip.",
            flags=("--skip-special-tokens/--keep-special-tokens",),
        ),
        _option(
            "token_ids_only",
            bool,
            "Send and print token ids instead of text. Default: text.",
            flags=("--token-ids-only/--with-text",),
        ),
        _option(
            "prompt_logprobs", int, "Report this many likely tokens at each prompt position (0 to 20; see --json)."
        ),
        _option("json_schema", TextOrFile(), "JSON Schema that outputs keep. Of this and the next four, one."),
        _option("json_object", bool, "Outputs are JSON objects.", flags=("--json-object/--any-text",)),
        _option("regex", str, "Regular expression that outputs match as a whole."),
        _option("choice", str, "A text that outputs may be, and nothing else. May be repeated.", many=True),
        _option("grammar", TextOrFile(), "Grammar in Lark's notation that outputs follow."),
        _option("best_of", int, "Outputs to sample, of which the -n best are returned; n to 20. Default: n."),
        _option(
            "beam_search",
            BeamOptions(),
            "Search for the -n most likely outputs: width (1 to 16), length penalty (1), and when it ends: heuristic, "
            "full or never. Default: outputs are sampled.",
        ),
        _option(
            "trace_detail",
            click.Choice(["off", "array", "span"]),
            "What is traced of each token. Default: the server's.",
        ),
        _option(
            "max_reasoning_tokens", int, "Tokens that an answer of a conversation may spend on reasoning, at least 1."
        ),
        _option(
            "reasoning_effort",
            click.Choice(["low", "medium", "high"]),
            "How much the model is to reason in a conversation. Default: as its chat template says.",
        ),
        _option(
            "max_drafts", int, "Drafted tokens that a step may verify, 1 to 8; 0: none. Default: the server's setting."
        ),
    )
}


# Field of a request, by which servers name it -> how this command line writes it.
FIELD_NAMES = {path_of(name): option.opts[-1] for name, option in GENERATION_OPTIONS.items()}
FIELD_NAMES |= {"spec.text": "the prompt", "spec.token_ids.ids": "--token-ids", "messages": "the conversation"}

# Each has a variable HEADRACE_<NAME>, which headrace_supervisor/config.py must know as the
# client's.
SERVER_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("server", str, f"Address of the server: host:port or unix:/path. Default: {DEFAULT_SERVER}."),
    ("api_key", str, "Key of the caller. Better in the variable: others on this machine can read command lines."),
    ("tls", bool, "Encrypt, and trust what the system trusts. Implied by the four below. Default: plaintext."),
    ("ca", _FILE, "Certificates (PEM) of the authorities that vouch for the server. Default: the system's."),
    ("client_certificate", _FILE, "The caller's own certificate (PEM), for servers that ask for one."),
    ("client_key", _FILE, "Private key (PEM) of --client-certificate."),
    ("server_name", str, "The name that the server's certificate must be for. Default: the host of the address."),
)


@dataclass(frozen=True, slots=True)
class Connection:
    """The server's address, how to call it, and whether to print JSON lines."""

    server: str
    options: ConnectionOptions
    as_json: bool

    def client(self, retry: RetryPolicy = ONCE) -> Client:
        """A client of that server.

        In front of a terminal the first failure is the answer, so nothing is retried by default.
        """
        return self._made(Client, retry)

    def admin(self) -> AdminClient:
        """The operator's client of that server."""
        return self._made(AdminClient, ONCE)

    def _made(self, kind: Callable[..., T], retry: RetryPolicy) -> T:
        try:
            return kind(self.server, retry=retry, **self.options)
        except PlaintextKey:
            raise click.UsageError(
                f"the API key would go to {self.server} in the clear: give --tls or --ca, or --allow-plaintext-key if "
                "the network is trusted"
            ) from None
        except OSError as error:
            raise click.UsageError(os_sentence(error)) from None
        except ValueError as error:
            raise click.UsageError(str(error)) from None


def server_options(command: F) -> F:
    """Adds --server, --json, key and TLS; the command gets them as `connection`."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON lines, errors included.")
    @click.option(
        "--allow-plaintext-key",
        cls=SectionedOption,
        section=_CONNECTION,
        is_flag=True,
        help="Send the key without TLS to another machine all the same.",
    )
    @functools.wraps(command)
    def with_connection(*args: Any, as_json: bool, allow_plaintext_key: bool, **values: Any) -> Any:
        given = {name: values.pop(name) for name, _, _ in SERVER_OPTIONS}
        server = _server(given["server"])
        context = click.get_current_context()
        context.meta[FACTS_KEY] = CallFacts(
            command=context.info_name or "",
            server=server,
            encrypted=bool(_tls(given)),
            timeout=values.get("timeout"),
            names=FIELD_NAMES,
            as_json=as_json,
        )
        options = ConnectionOptions(api_key=given["api_key"], tls=_tls(given), allow_plaintext_key=allow_plaintext_key)
        return command(*args, connection=Connection(server, options, as_json), **values)

    for name, kind, text in reversed(SERVER_OPTIONS):
        flag = "--" + name.replace("_", "-")
        declared = f"{flag}/--no-tls" if kind is bool else flag
        variable = "HEADRACE_" + name.upper()
        click.option(
            declared,
            name,
            cls=SectionedOption,
            section=_CONNECTION,
            type=kind,
            envvar=variable,
            show_envvar=True,
            default=None,
            help=text,
        )(with_connection)
    return cast(F, with_connection)


def _server(given: str | None) -> str:
    """The address to call.

    Raises:
        click.UsageError: It is a URL, whose scheme gRPC would take for a part of the name.
    """
    for scheme in ("http://", "https://", "grpc://"):
        if given and given.startswith(scheme):
            raise click.UsageError(f"--server takes HOST:PORT, without {scheme}")
    return given or DEFAULT_SERVER


def _tls(given: dict[str, Any]) -> bool | Tls:
    """TLS as it was asked for.

    Raises:
        click.UsageError: The options contradict each other.
    """
    files = {name: given[option] for name, option in _TLS_FIELDS.items() if given[option] is not None}
    if not files or given["tls"] is False:
        return bool(given["tls"])
    if (given["client_certificate"] is None) != (given["client_key"] is None):
        raise click.UsageError("--client-certificate and --client-key belong together: give both, or neither")
    return Tls(**files)


def trace_option(command: F) -> F:
    """Adds --trace; the command gets it as `trace`."""
    return click.option(
        "--trace", is_flag=True, help="Have the server trace this call, and say on stderr how to see its trace."
    )(command)


def generation_options(command: F) -> F:
    """Adds all options of GenerationOptions; the command gets those given as `options`."""

    @functools.wraps(command)
    def with_options(*args: Any, **values: Any) -> Any:
        given = {name: values.pop(name) for name in GENERATION_OPTIONS}
        return command(*args, options=given_options(given), **values)

    for option in reversed(GENERATION_OPTIONS.values()):
        with_options.__dict__.setdefault("__click_params__", []).append(option)
    return cast(F, with_options)


def given_options(values: dict[str, Any]) -> GenerationOptions:
    """Parsed values as keyword arguments of the client; what was not given is left out."""
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return cast(GenerationOptions, given)


def prompt_text(prompt: str | None, token_ids: list[int] | None) -> str | None:
    """The prompt: the argument, or standard input for "-" and where nothing is given but a pipe.

    Raises:
        click.UsageError: Neither a prompt nor token ids, or both, or no text.
    """
    if token_ids is not None:
        if prompt is not None:
            raise click.UsageError("give a prompt or --token-ids, not both")
        return None
    from_stdin = prompt == "-" or (prompt is None and not (sys.stdin is None or sys.stdin.isatty()))
    if from_stdin:
        prompt = _text_of_stdin()
    if prompt is None:
        raise click.UsageError("give a prompt, --token-ids, or text on standard input")
    if not prompt:
        raise click.UsageError("the prompt is empty" + (": nothing came on standard input" if from_stdin else ""))
    return prompt


def _text_of_stdin() -> str:
    """What standard input holds.

    Raises:
        click.UsageError: It is closed, or no UTF-8.
    """
    if sys.stdin is None:
        raise click.UsageError("standard input is closed")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is no UTF-8 text: see byte {error.start:,}") from None
