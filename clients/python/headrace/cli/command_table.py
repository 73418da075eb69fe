"""The commands by name: under which title help lists them, what it says, and where ours are.

Owns the table, so that help, and the answer to a mistyped name, import no command. What it says of
a command is the first sentence of the command's own help, to which tests hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Listed(NamedTuple):
    """A command in the list of all.

    Attributes:
        summary: What it does, in a sentence.
        module: Module of this package that has it, by the command's name; "": it comes with
            headrace-server.
    """

    summary: str
    module: str = ""


SECTIONS: Mapping[str, Mapping[str, Listed]] = {
    "Run a server": {
        "demo": Listed(
            "Start a server with the demo model, stream an answer, show its times, and stop the server.", "demo"
        ),
        "serve": Listed("Runs a server: backends, the services that speak gRPC, and telemetry."),
        "pull": Listed("Fetches a model from a hub, and prints where it is."),
        "doctor": Listed("Says what this machine can run, and why not."),
        "plan": Listed("Says which numbers of ranks hold a model and its users."),
        "quantize": Listed("Writes a model in fewer bits."),
    },
    "Ask a server": {
        "chat": Listed("Talk to the model, line by line; /help lists what else can be typed.", "chat"),
        "generate": Listed(
            'Continue PROMPT and print the text as it arrives ("-": from standard input).', "generation"
        ),
        "submit": Listed("Start a generation that outlives its readers and print its request id.", "generation"),
        "subscribe": Listed(
            "Read the generation REQUEST_ID from any token on; a broken connection is opened again.", "generation"
        ),
        "cancel": Listed("End generations of one's own.", "generation"),
        "requests": Listed(
            "List one's own generations: waiting, running, and ended ones whose log is still kept.", "listing"
        ),
        "models": Listed("List the models of the server and what they allow.", "listing"),
        "load": Listed("Show how busy the server is.", "listing"),
    },
    "Look into it": {
        "trace": Listed("Shows every token of one request."),
        "bench": Listed("Measures a running server."),
        "health": Listed("Asks ADDRESS whether it is well: exit code 0 if it is, 1 if not."),
    },
    "Operate it": {
        "admin": Listed(
            'Models, drain and memory of a running server; needs a key with the permission "admin".', "admin"
        ),
        "keys": Listed("Makes, lists, revokes and rotates the API keys of a server."),
        "certs": Listed("Makes a CA, and certificates of servers and clients, in FOLDER."),
    },
    "Run its parts alone": {
        "service": Listed("Runs one service process alone, on behalf of a backend elsewhere."),
        "backend": Listed("Runs one backend alone, with its worker: the engine that services connect to."),
        "ranks": Listed("Runs ranks of an engine whose backend is on another host, with --hosts."),
        "telemetry": Listed("Runs the telemetry process alone."),
        "ray": Listed("Runs engines and services on a Ray cluster."),
    },
    "For your shell": {
        "completion": Listed("Print a script that completes commands, options and values in SHELL.", "shell.command"),
    },
}
COMMANDS: Mapping[str, Listed] = {name: listed for commands in SECTIONS.values() for name, listed in commands.items()}
OWN_COMMANDS = frozenset(name for name, listed in COMMANDS.items() if listed.module)
SERVER_COMMANDS = frozenset(COMMANDS) - OWN_COMMANDS
