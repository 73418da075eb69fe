"""Tokens per second with speculation against without, in turns: real drafters, and forced ones.

    python -m benchmarks.bench_speculation --batches 1,8 --ks 4,auto --acceptances 0,0.8

All engines are alive at once and serve the same requests in turns, greedily: one without
speculation, and one for each number of drafts. Wall time is from the last first token to the first
end, or from first to last token where rows end before others have begun (`rows_overlap` is false
then, and its ratio is not to be compared with others). `ratio_to_off` is of wall times;
`cpu_ratio_to_off`, of the CPU time that workers took for a token, says the same of a busy machine.

With `--acceptances` each draft is right with that probability, whatever was drafted
(`forced_worker`): what verification, planning and the drafter's own cost make of it. `--drafter
free` costs nothing then, and `--drafter eagle` has a head made for a `--shape`; `--drafter mtp` is
for a `--model` that has a layer for it. Without, drafts are as right as they are, on prompts that
repeat themselves (`repetitive`) and on others (`plain`), and `equal_answers` is the share of
requests whose tokens equal those without speculation (logits that nearly tie may round otherwise in
a batch of another shape).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib
import random
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.backend_process import PROGRAM
from benchmarks.engine_session import Answer, EngineSession, Prompt, engine_session
from benchmarks.figures import report
from benchmarks.forced_worker import acceptance_seed
from benchmarks.shapes import SHAPES, write_head_folder, write_model_folder
from headrace_request.sampling import Sampling

_PROMPT_TOKENS = 64
_PATTERN_TOKENS = 8
# Where drafts are forced, what a prompt says does not matter: of 256 such all rows begin in a step
# or two, before any of them has ended.
_FORCED_PROMPT_TOKENS = 8
_FIRST_ID = 10
# Tokens that a step may settle beyond an answer's end.
_SPARE_TOKENS = 16
_WARM_TOKENS = 32
_START_S = 300.0
_DRAFTERS = ("free", "ngram", "suffix", "draft", "eagle", "mtp")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What all engines are asked in turns."""

    batch: int
    # Probability of each draft; None: whatever the drafter achieves.
    acceptance: float | None
    workload: str
    # Tokens of each answer.
    num_tokens: int


@dataclasses.dataclass(slots=True)
class Turn:
    """What one turn took."""

    tokens_per_s: float
    cpu_s_per_token: float
    answers: list[list[int]]
    steps: float
    drafted: int
    accepted: int
    # Whether it was timed while all rows decoded.
    rows_overlap: bool


def prompts(case: Case, vocab_size: int) -> list[Prompt]:
    """The requests of a case; where drafts are forced, their seeds say how often."""
    rng = random.Random(0)
    made = []
    for number in range(1, case.batch + 1):
        if case.workload == "repetitive":
            pattern = [rng.randrange(_FIRST_ID, vocab_size) for _ in range(_PATTERN_TOKENS)]
            ids = pattern * (_PROMPT_TOKENS // _PATTERN_TOKENS)
        else:
            length = _PROMPT_TOKENS if case.acceptance is None else _FORCED_PROMPT_TOKENS
            ids = [rng.randrange(_FIRST_ID, vocab_size) for _ in range(length)]
        prompt = Prompt.of(ids, case.num_tokens)
        seed = number if case.acceptance is None else acceptance_seed(number, case.acceptance)
        sampling = Sampling(temperature=0.0, seed=seed)
        made.append(dataclasses.replace(prompt, sampling=sampling, min_tokens=case.num_tokens))
    return made


async def serve(session: EngineSession, asked: list[Prompt]) -> list[Answer]:
    """Sends all requests at once and returns when they have ended."""
    return list(await asyncio.gather(*(session.ask(prompt) for prompt in asked)))


async def turn(session: EngineSession, asked: list[Prompt]) -> Turn:
    """One run of all requests."""
    cpu_before = _cpu_s(session)
    answers = await serve(session, asked)
    cpu_s = _cpu_s(session) - cpu_before
    begin_s, end_s = (chosen(times) for chosen, times in zip((max, min), _ends(answers), strict=True))
    rows_overlap = end_s > begin_s
    if not rows_overlap:
        begin_s, end_s = (chosen(times) for chosen, times in zip((min, max), _ends(answers), strict=True))
    arrivals = np.concatenate([answer.arrivals_array for answer in answers])
    counted = int(((arrivals > begin_s) & (arrivals <= end_s)).sum())
    done = [answer.done for answer in answers if answer.done is not None]
    return Turn(
        tokens_per_s=counted / max(end_s - begin_s, 1e-9),
        cpu_s_per_token=cpu_s / arrivals.size,
        answers=[answer.token_ids for answer in answers],
        steps=statistics.mean([ended.step_count for ended in done]),
        drafted=sum(ended.draft_tokens for ended in done),
        accepted=sum(ended.accepted_tokens for ended in done),
        rows_overlap=rows_overlap,
    )


def _ends(answers: list[Answer]) -> tuple[list[float], list[float]]:
    """When the first token of each answer came, and the last one."""
    return [answer.arrivals_s[0] for answer in answers], [answer.arrivals_s[-1] for answer in answers]


def _cpu_s(session: EngineSession) -> float:
    times = [worker.cpu_times() for worker in session.process.workers()]
    return float(sum(spent.user + spent.system for spent in times))


async def compare(case: Case, sessions: dict[str, EngineSession], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One case: a row for each engine that speculates, in turns with the one that does not."""
    asked = prompts(case, sessions["off"].model.vocabulary_size)
    turns: dict[str, list[Turn]] = {name: [] for name in sessions}
    for _ in range(options.repeats):
        for name, session in sessions.items():
            turns[name].append(await turn(session, asked))
    device = sessions["off"].model.device
    return [
        {"drafter": options.drafter, "k": k if k == "auto" else int(k), **_row(case, turns["off"], turns[k])}
        | {"device": device}
        for k in options.ks
    ]


def _row(case: Case, off: list[Turn], on: list[Turn]) -> dict[str, Any]:
    pairs = list(zip(off, on, strict=True))
    last = on[-1]
    equal = statistics.mean([ids == answer for ids, answer in zip(off[-1].answers, last.answers, strict=True)])
    return {
        "batch": case.batch,
        "workload": case.workload,
        "tokens": case.num_tokens,
        "acceptance": case.acceptance if case.acceptance is not None else "measured",
        "ratio_to_off": round(statistics.median([b.tokens_per_s / a.tokens_per_s for a, b in pairs]), 3),
        "cpu_ratio_to_off": round(statistics.median([a.cpu_s_per_token / b.cpu_s_per_token for a, b in pairs]), 3),
        "off_tok_s": round(statistics.median([each.tokens_per_s for each in off]), 1),
        "tokens_per_step": round(len(last.answers[0]) / last.steps, 3),
        "draft_tokens": last.drafted,
        "accepted_tokens": last.accepted,
        "rows_overlap": all(each.rows_overlap for each in (*off, *on)),
        "equal_answers": round(equal, 3) if case.acceptance is None else "forced",
    }


def cases(options: argparse.Namespace) -> list[Case]:
    """All cases that the options name."""
    kinds: list[tuple[float | None, str]] = [(share, "plain") for share in options.acceptances]
    kinds = kinds or [(None, "plain"), (None, "repetitive")]
    return [
        Case(batch, acceptance, workload, num_tokens)
        for batch, num_tokens in zip(options.batches, options.tokens, strict=True)
        for acceptance, workload in kinds
    ]


async def run(options: argparse.Namespace, model: pathlib.Path, draft: pathlib.Path | None) -> list[dict[str, Any]]:
    """All rows, each printed as soon as it is measured."""
    engine: dict[str, Any] = {
        "model": str(model),
        "device": options.device,
        "enable_prefix_cache": False,
        "worker_threads": options.threads,
        "max_num_seqs": max(options.batches),
        "max_model_len": _PROMPT_TOKENS + max(*options.tokens, _WARM_TOKENS) + _SPARE_TOKENS,
        "quantize": options.quant,
        "tp": options.tp,
    }
    if options.shape:
        engine["load"] = "dummy"
    if options.kv_memory:
        engine["kv_memory"] = options.kv_memory
    drafts = {"speculate": "ngram" if options.drafter == "free" else options.drafter}
    if draft is not None:
        drafts["draft_model"] = str(draft)
    program = _forced_program(options) if options.acceptances else PROGRAM
    async with contextlib.AsyncExitStack() as stack:
        started = [stack.enter_async_context(engine_session(engine, _START_S))]
        for k in options.ks:
            settings = engine | drafts | {"speculate_tokens": k}
            started.append(stack.enter_async_context(engine_session(settings, _START_S, program=program)))
        # One after the other: each looks at the memory that is free.
        sessions = {name: await start for name, start in zip(["off", *options.ks], started, strict=True)}
        warm = prompts(Case(min(options.batches), 0.5, "plain", _WARM_TOKENS), sessions["off"].model.vocabulary_size)
        for session in sessions.values():
            await serve(session, warm)
        return await _compare_all(sessions, options)


async def _compare_all(sessions: dict[str, EngineSession], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for case in cases(options):
        began = time.monotonic()
        found = await compare(case, sessions, options)
        rows += found
        for row in found:
            print(f"{row} ({time.monotonic() - began:.0f} s)", flush=True)
    return rows


def _forced_program(options: argparse.Namespace) -> tuple[str, str]:
    return "benchmarks.forced_backend", "free" if options.drafter == "free" else "own"


def _list(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/demo"))
    parser.add_argument("--shape", choices=SHAPES, help="instead of --model, with dummy weights")
    parser.add_argument("--quant", default="off", help="bits of the layers' weights")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafter", choices=_DRAFTERS, default="free", help="free: proposes anything, for nothing")
    parser.add_argument("--draft-model", type=pathlib.Path)
    parser.add_argument("--draft-shape", choices=SHAPES, help="instead of --draft-model, with dummy weights")
    parser.add_argument("--ks", type=_list, default=["4", "auto"], help="numbers of drafts, and auto")
    parser.add_argument("--batches", type=_numbers, default=[1, 8])
    parser.add_argument(
        "--acceptances",
        type=lambda text: [float(part) for part in text.split(",") if part],
        default=[],
        help="probabilities of each draft; none: as the drafter's are",
    )
    parser.add_argument(
        "--tokens", type=_numbers, default=[160], help="tokens of each answer: one number, or one for each batch"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a worker")
    parser.add_argument("--kv-memory", default="", help="of each of the engines: a GPU has room for all")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.drafter == "free" and not options.acceptances:
        parser.error("--drafter free proposes nothing worth having: name --acceptances")
    if len(options.tokens) == 1:
        options.tokens *= len(options.batches)
    if len(options.tokens) != len(options.batches):
        parser.error("--tokens: one number, or one for each of --batches")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        model = write_model_folder(options.shape, pathlib.Path(name)) if options.shape else options.model
        draft = options.draft_model
        if draft is None and options.shape and options.drafter == "eagle":
            draft = write_head_folder(model, pathlib.Path(name))
        if options.draft_shape:
            (drafts := pathlib.Path(name) / "drafts").mkdir()
            draft = write_model_folder(options.draft_shape, drafts)
        report("speculation", {"rows": asyncio.run(run(options, model, draft))}, options.json)


if __name__ == "__main__":
    main()
