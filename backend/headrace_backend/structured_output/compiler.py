"""Compiles structured output, and keeps what it compiled.

Owns the cache, by the form and its text, and the threads that wait for trials and compile. A
grammar that was compiled once costs nothing again while it is kept; each request of it begins with
a copy of its beginning. Nothing here is done on the engine's thread but looking into the cache.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import llguidance
from llguidance import LLMatcher

from headrace_backend.engine.errors import RefusalCode, RequestRefused, Violation
from headrace_backend.structured_output.forms import grammar_of
from headrace_backend.structured_output.output_place import CompiledGrammar
from headrace_backend.structured_output.stacks import thread_pool
from headrace_backend.structured_output.trial import LIMITS, Verdict
from headrace_backend.structured_output.trial_process import TrialProcess
from headrace_backend.structured_output.vocabulary import Vocabulary, folder_tokenizer, read_vocabulary
from headrace_model_folder import ModelFolder
from headrace_request.structured_output import StructuredOutput

# Grammars that are kept, and the memory that they took when they were tried. Eight bytes of a
# regular expression may take 30 MiB.
_MAX_KEPT: Final = 128
_MAX_KEPT_BYTES: Final = 512 << 20
# Grammars that wait to be compiled; each takes up to 2 s twice.
_MAX_WAITING: Final = 64
_NUM_THREADS: Final = 2
# As long as a queue of such that take a second each.
_RETRY_NS: Final = 1_000_000_000 * _MAX_WAITING // _NUM_THREADS

Compiled = concurrent.futures.Future[CompiledGrammar]


class GrammarCompiler:
    """Compiles for one model. `compile` and `close` are called by one thread."""

    def __init__(self, vocabulary: Vocabulary, make_tokenizer: Callable[[], llguidance.LLTokenizer]) -> None:
        """Nothing is compiled, and no thread runs.

        Args:
            vocabulary: The model's.
            make_tokenizer: Makes the vocabulary in the library's form, in a thread, when the first
                grammar comes.
        """
        self._vocabulary = vocabulary
        self._make_tokenizer = make_tokenizer
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._making = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._thread = threading.local()
        self._trials: list[TrialProcess] = []
        self._kept: OrderedDict[StructuredOutput, Compiled] = OrderedDict()
        # Whether there may be too many since somebody looked: requests of known forms add none.
        self._may_exceed = False

    def compile(self, asked: StructuredOutput) -> Compiled:
        """The compiled grammar, which may be there already. Its exception is a `RequestRefused`.

        Raises:
            RequestRefused: RESOURCE_EXHAUSTED, too many wait.
        """
        kept = self._kept.get(asked)
        if kept is not None and not _failed(kept):
            self._kept.move_to_end(asked)
            return kept
        if sum(not compiled.done() for compiled in self._kept.values()) >= _MAX_WAITING:
            message = f"{_MAX_WAITING} structured outputs wait to be compiled; more are not taken"
            raise RequestRefused(RefusalCode.RESOURCE_EXHAUSTED, message, retry_after_ns=_RETRY_NS)
        if self._pool is None:
            self._pool = thread_pool(_NUM_THREADS, "grammars")
        self._kept.pop(asked, None)
        compiled = self._kept[asked] = self._pool.submit(self._compile, asked)
        self._may_exceed = True
        return compiled

    def give_up(self, asked: StructuredOutput) -> None:
        """Nobody waits for a grammar any more: it is not compiled if that has not begun."""
        compiled = self._kept.get(asked)
        if compiled is not None and compiled.cancel():
            del self._kept[asked]

    def make_room(self) -> None:
        """Forgets the grammars that nobody asked for the longest, of those that are compiled."""
        if not self._may_exceed:
            return
        self._may_exceed = not all(compiled.done() for compiled in self._kept.values())
        ended = {asked: _num_bytes(asked, compiled) for asked, compiled in self._kept.items() if compiled.done()}
        num_kept, num_bytes = len(ended), sum(ended.values())
        for asked, size in ended.items():
            if num_kept <= _MAX_KEPT and num_bytes <= _MAX_KEPT_BYTES:
                return
            del self._kept[asked]
            num_kept, num_bytes = num_kept - 1, num_bytes - size

    def close(self) -> None:
        """Ends threads and processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    # In its threads.

    def _compile(self, asked: StructuredOutput) -> CompiledGrammar:
        verdict = self._trial().try_grammar(asked)
        if verdict.error:
            raise _refused(asked, verdict)
        matcher = LLMatcher(self._made_tokenizer(), grammar_of(asked), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refused(asked, Verdict("can't be compiled"))
        return CompiledGrammar(matcher, self._vocabulary.end_ids, verdict.num_bytes)

    def _trial(self) -> TrialProcess:
        trial: TrialProcess | None = getattr(self._thread, "trial", None)
        if trial is None:
            trial = self._thread.trial = TrialProcess(self._vocabulary)
            self._trials.append(trial)
        return trial

    def _made_tokenizer(self) -> llguidance.LLTokenizer:
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            return self._tokenizer


def grammar_compiler(folder: ModelFolder) -> GrammarCompiler | None:
    """The compiler for a model folder; None if it lacks a tokenizer or an end-of-text token."""
    vocabulary = read_vocabulary(folder)
    return GrammarCompiler(vocabulary, lambda: folder_tokenizer(vocabulary, folder)) if vocabulary is not None else None


def _failed(compiled: Compiled) -> bool:
    """Whether compiling ended otherwise than with a grammar or a refusal of what was asked."""
    if not compiled.done():
        return False
    return compiled.cancelled() or not isinstance(compiled.exception(), RequestRefused | None)


def _num_bytes(asked: StructuredOutput, compiled: Compiled) -> int:
    """What a kept grammar, or what was found in its place, takes."""
    source = len(asked.text) + len(asked.around)
    return source if _failed(compiled) or compiled.exception() else source + compiled.result().num_bytes


def _refused(asked: StructuredOutput, verdict: Verdict) -> RequestRefused:
    where = f"at {verdict.path}: " if verdict.path else ""
    return RequestRefused.invalid([Violation(f"spec.structured_output.{asked.form}", where + verdict.error)])
