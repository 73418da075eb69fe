"""The chat template's helper process: renders conversations and may be killed at any moment.

Started by `chat_template` as a script. Reads length-prefixed JSON from stdin, writes the same to
stdout, each answer with the CPU time used so far ("cpu_s"), ends at end of file. A template is a
program: Jinja's sandbox keeps it from touching the process, and nothing but limits of the kernel
keeps it from eating memory and time (`{{ 'a' * 10**9 }}` passes the sandbox). Imports nothing of
this package, so that it starts quickly and stays small.
"""

from __future__ import annotations

import datetime
import json
import re
import resource
import struct
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

_LENGTH = struct.Struct("<I")
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the conversation, by `raise_exception`."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the model's own words for training.

    Here the block is just its body.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """Returns the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(text: str) -> NoReturn:
    raise _TemplateRefusal(text)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def compile_template(source: str) -> jinja2.Template:
    """Returns the template in the environment that model makers write theirs for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def answer(question: dict[str, Any], templates: dict[str, jinja2.Template]) -> dict[str, Any]:
    """Renders one conversation.

    Args:
        question: "source", "variables", "max_chars", "cpu_s".
        templates: compiled ones by source.

    Returns:
        {"text": ...}, which UTF-8 can hold, or {"refused": what the template said}, or {"failed":
        what kind of error}.
    """
    try:
        source = question["source"]
        if source not in templates:
            templates[source] = compile_template(source)
        _allow_cpu(question["cpu_s"])
        return _render(templates[source], question["variables"], question["max_chars"])
    except _TemplateRefusal as refusal:
        return {"refused": str(refusal)[:200]}
    except MemoryError:
        return {"failed": "it needs more memory than it may have"}
    except Exception as error:  # whatever a template does is the template's failure
        return {"failed": type(error).__name__}


def _render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> dict[str, Any]:
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(**variables):
        num_chars += len(piece)
        if num_chars > max_chars:
            return {"failed": f"its text has more than {max_chars} characters"}
        pieces.append(piece)
    text = "".join(pieces)
    half = _HALF_OF_A_PAIR.search(text)
    if half is not None:
        return {"failed": f"its text has U+{ord(half[0]):04X}, half of a surrogate pair, which is no character"}
    return {"text": text}


def _allow_cpu(seconds: int) -> None:
    """Lets this process use that much more CPU time; beyond it the kernel kills it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _serve(questions: IO[bytes], answers: IO[bytes], respond: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    while len(header := questions.read(_LENGTH.size)) == _LENGTH.size:
        reply = respond(json.loads(questions.read(_LENGTH.unpack(header)[0])))
        data = json.dumps({**reply, "cpu_s": time.process_time()}).encode()
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


def main() -> None:
    """Limits this process, then serves until stdin ends."""
    memory_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    templates: dict[str, jinja2.Template] = {}
    _serve(sys.stdin.buffer, sys.stdout.buffer, lambda question: answer(question, templates))


if __name__ == "__main__":
    main()
