"""`headrace trace` on the command line.

Flags become a source, a trace becomes a page, a picture or words, and errors become exit codes.

Owns the flags and what is written where. Traces are read in sources.py, explained in causes.py,
drawn in page.py and picture.py.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Sequence

import click

from headrace.cli.failures import FACTS_KEY, show_failure
from headrace.cli.help import SectionedCommand
from headrace.cli.options import Connection, server_options
from headrace.cli.output import as_json, warn
from headrace.errors import HeadraceError
from headrace_trace import picture, sources
from headrace_trace.causes import explain
from headrace_trace.explanation import Explanation
from headrace_trace.page import render
from headrace_trace.reading import SeveralRequests
from headrace_trace.spans import TraceError
from headrace_trace.trace_model import Trace
from headrace_trace.words import cause_words, lines_of, plain

_EXAMPLES = """\b
Examples:
  headrace trace REQUEST_ID                           page and picture
  headrace trace traces.jsonl --request REQUEST_ID --explain  in words
  headrace trace TRACE_ID --jaeger http://127.0.0.1:16686  from Jaeger
"""
_PATH = click.Path(dir_okay=False, path_type=pathlib.Path)
# What a file name may hold of a request id, which callers may have a say in.
_NOT_FOR_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 80
_FILE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".pb", ".bin", ".otlp", ".log", ".txt")


@click.command(cls=SectionedCommand, context_settings={"help_option_names": ["--help", "-h"]}, epilog=_EXAMPLES)
@click.argument("source", nargs=-1, required=True, metavar="FILE... | REQUEST_ID | TRACE_ID")
@click.option("--request", "request_id", help="Which request, where files or a trace hold several.")
@click.option("--trace", "trace_id", help="Which trace, where files hold several.")
@click.option(
    "--jaeger", metavar="URL", help="Ask a Jaeger query service instead of the server, as in http://127.0.0.1:16686."
)
@click.option(
    "--html", type=_PATH, help="Write the page here. Default: trace-REQUEST.html, unless --png or --explain is given."
)
@click.option("--png", type=_PATH, help="Write a picture here; needs the bench extra. Default: as --html.")
@click.option(
    "--explain", "in_words", is_flag=True, help="Say in words where the time went and what the longest waits were for."
)
@server_options
def trace(
    connection: Connection,
    source: tuple[str, ...],
    request_id: str | None,
    trace_id: str | None,
    jaeger: str | None,
    html: pathlib.Path | None,
    png: pathlib.Path | None,
    in_words: bool,
) -> None:
    """Shows every token of one request.

    When it was planned, computed, read and sent, who shared its steps, and what it waited for.

    FILE holds OpenTelemetry traces (OTLP as JSON, JSON lines or protobuf), as the server's
    trace_file or a collector writes them. An id is looked up in the memory of a running server
    (--server) or in Jaeger (--jaeger). With --json the explanation is printed as one JSON line,
    with every token's wait.
    """
    try:
        if png is not None:
            picture.check()
        read = _read(connection, source, request_id, trace_id, jaeger)
        explanation = explain(read)
        if connection.as_json:
            click.echo(json.dumps(as_json(_with_words(explanation))))
        elif in_words:
            click.echo("\n".join(lines_of(explanation)))
        _write(read, explanation, html, png, quiet=in_words or connection.as_json)
    except SeveralRequests as error:
        raise click.UsageError(plain(str(error))) from None
    except HeadraceError as error:
        show_failure(error, click.get_current_context().meta[FACTS_KEY])
        sys.exit(1)
    except TraceError as error:
        _fail(error, connection)


def _read(
    connection: Connection, source: Sequence[str], request_id: str | None, trace_id: str | None, jaeger: str | None
) -> Trace:
    """The trace that the command line names.

    Raises:
        click.UsageError: It names none, or contradicts itself.
    """
    if "" in source:
        raise click.UsageError("an empty name is neither a file nor an id")
    paths = [pathlib.Path(name) for name in source]
    if all(path.exists() or _looks_like_file(name) for path, name in zip(paths, source, strict=True)):
        if jaeger is not None:
            raise click.UsageError("--jaeger is for ids, not for files")
        return sources.from_files(paths, request_id, trace_id and trace_id.lower())
    if len(source) > 1:
        raise click.UsageError("give files, or one request id or trace id")
    key = source[0]
    if trace_id is not None or (request_id is not None and not sources.is_trace_id(key)):
        raise click.UsageError("--request and --trace choose among what files hold; --request also within a TRACE_ID")
    if jaeger is not None:
        return sources.from_jaeger(jaeger, key, request_id)
    with connection.admin() as client:
        return sources.from_server(client, connection.server, key, request_id)


def _looks_like_file(name: str) -> bool:
    return "/" in name or name.endswith(_FILE_SUFFIXES)


def _write(
    read: Trace, explanation: Explanation, html: pathlib.Path | None, png: pathlib.Path | None, *, quiet: bool
) -> None:
    """Writes what was asked for.

    Without an option that is the page, and the picture where it can be drawn.
    """
    if html is None and png is None and not quiet:
        name = _NOT_FOR_NAMES.sub("_", read.request_id).strip("._")[:_LONGEST_NAME] or read.trace_id
        html = pathlib.Path(f"trace-{name}.html")
        try:
            picture.check()
            png = html.with_suffix(".png")
        except TraceError as error:
            warn(f"no picture: {error}")
    if html is not None:
        _write_file(html, render(read, explanation).encode(), quiet)
    if png is not None:
        _write_file(png, picture.draw(read, explanation), quiet)


def _write_file(path: pathlib.Path, data: bytes, quiet: bool) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if not quiet:
        click.echo(str(path))


def _with_words(explanation: Explanation) -> dict[str, object]:
    """The explanation as JSON types, the longest waits also in words."""
    slowest = [
        {"output": gap.output, "index": gap.index, "ms": gap.ms, "words": cause_words(gap, explanation)}
        for gap in explanation.slowest()
    ]
    return {**as_json(explanation), "slowest": slowest}


def _fail(error: TraceError, connection: Connection) -> None:
    """One line on stderr, and the exit code of an error."""
    if connection.as_json:
        warn(json.dumps({"error": {"message": str(error)}}))
    else:
        warn(f"error: {plain(str(error))}")
    sys.exit(1)
