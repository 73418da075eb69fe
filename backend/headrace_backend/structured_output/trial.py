"""Tries grammars in a process that may be killed.

Compiling somebody else's schema can take minutes, gigabytes or the whole stack, and a thread can't
be stopped. So each grammar is compiled here first, with its first mask: within 2 s of computing
time, which the kernel counts, and 256 MiB more than the process has. What passes is compiled again
where it is used, and what does not takes at most this process with it.

Owns the process, `python -m headrace_backend.structured_output.trial`: limits, what crosses its
pipes, and where in a schema a mistake lies. Who starts it is `trial_process`.
"""

from __future__ import annotations

import ctypes
import re
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, Final

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits

from headrace_backend.structured_output.forms import form_grammar, schema_grammar
from headrace_backend.structured_output.stacks import TRIAL_STACK_BYTES
from headrace_backend.structured_output.vocabulary import Vocabulary, make_tokenizer
from headrace_request import json_schema
from headrace_request.structured_output import StructuredOutput

MAX_COMPILE_S: Final = 2
MAX_COMPILE_BYTES: Final = 256 << 20
# A lexer's states are made while text is generated, and take some kilobytes each.
LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# A form whose masks are beyond the limits often shows it at its first tokens.
_NUM_TOKENS_TRIED: Final = 4
# Parts of a schema that are compiled by themselves to find the one that is at fault.
_MAX_PARTS_TRIED: Final = 200
_MAX_ERROR_CHARACTERS: Final = 300
# glibc's: gives what was freed back to the system. None: another library has no such function.
_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)
_EXCERPT: Final = re.compile(r"[0-9]+ \||\^")
_LENGTH = struct.Struct("<I")


class Verdict(msgspec.Struct, frozen=True):
    """What came of a trial."""

    # "": the grammar compiles, and some text has the form. Otherwise what is wrong, in words.
    error: str = ""
    # JSON pointer of the part of the schema that is at fault; "": the whole, or no schema.
    path: str = ""
    # Memory that the compiled grammar takes, with the masks that were tried.
    num_bytes: int = 0


def try_grammar(tokenizer: llguidance.LLTokenizer, asked: StructuredOutput) -> Verdict:
    """Compiles a grammar and its first mask, without limits."""
    # What stands around a form is small and not the caller's, and its tokens come first: the four
    # that are tried are to be the form's own.
    before = _resident_bytes()
    error, matcher = _tried_tokens(tokenizer, form_grammar(asked))
    num_bytes = max(0, _resident_bytes() - before)
    del matcher
    if not error or asked.form != "json_schema":
        return Verdict(error, num_bytes=num_bytes)
    schema = msgspec.json.decode(asked.text)
    return Verdict(error, _place_of(error, schema, lambda part: _error_of(tokenizer, schema_grammar(part))))


def _error_of(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    return _tried_tokens(tokenizer, grammar)[0]


def _tried_tokens(tokenizer: llguidance.LLTokenizer, grammar: str) -> tuple[str, LLMatcher]:
    """What is wrong with a grammar, "" for nothing, and its matcher behind the first tokens."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for _ in range(_NUM_TOKENS_TRIED):
        if matcher.is_stopped():
            break
        words = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            break
        if not words:
            return "no text has this form", matcher
        matcher.consume_token((words & -words).bit_length() - 1)
    return _sentence(matcher.get_error()), matcher


def _resident_bytes() -> int:
    """The process's memory, of which nothing is left that is not used any more."""
    if _trim is not None:
        _trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _sentence(error: str) -> str:
    """What the library says, as one line for a caller."""
    if error.startswith("NoExtension"):
        return "no text has this form"
    lines = [line.strip() for line in error.split("<", 1)[0].splitlines()]
    # Without the excerpts that show where in the grammar it is.
    line = " ".join(line for line in lines if line and not _EXCERPT.match(line))
    return line[:_MAX_ERROR_CHARACTERS] or ("can't be compiled" if error else "")


def _place_of(error: str, schema: Any, error_of: Callable[[Any], str]) -> str:
    """The deepest part of a schema that has the error by itself, as a JSON pointer."""
    root = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    place, part, num_tried = "", schema, 0
    while True:
        for path, child in json_schema.parts(part):
            num_tried += 1
            if num_tried > _MAX_PARTS_TRIED:
                return place
            if error_of(root | child) == error:
                place, part = place + path, child
                break
        else:
            return place


def read_record(stream: BinaryIO) -> bytes | None:
    """The next record of a pipe; None: it was closed."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size: int = _LENGTH.unpack(head)[0]
    data = stream.read(size)
    return data if len(data) == size else None


def write_record(stream: BinaryIO, data: bytes) -> None:
    """Writes a record to a pipe."""
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def main() -> None:
    """Answers with a verdict for each structured output, until standard input ends."""
    vocabulary = read_record(sys.stdin.buffer)
    if vocabulary is None:
        return
    tokenizer = make_tokenizer(msgspec.msgpack.decode(vocabulary, type=Vocabulary))
    _limit_memory()
    threading.stack_size(TRIAL_STACK_BYTES)
    while (asked := read_record(sys.stdin.buffer)) is not None:
        answers: list[Verdict] = []
        output = msgspec.msgpack.decode(asked, type=StructuredOutput)
        trial = threading.Thread(
            target=lambda output=output, answers=answers: answers.append(_tried(tokenizer, output))
        )
        # The default action of its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
        trial.start()
        trial.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_record(sys.stdout.buffer, msgspec.msgpack.encode(answers[0]))


def _tried(tokenizer: llguidance.LLTokenizer, asked: StructuredOutput) -> Verdict:
    try:
        return try_grammar(tokenizer, asked)
    # A panic of the library's is no Exception.
    except BaseException as error:
        return Verdict(_sentence(str(error)) or type(error).__name__)


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    limit = size + MAX_COMPILE_BYTES + TRIAL_STACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
