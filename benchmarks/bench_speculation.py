"""Tokens per second with speculation against without, in turns: real drafters, and forced ones.

    python -m benchmarks.bench_speculation --batches 1,8 --ks 4,auto --acceptances 0,0.8

`--drafters forced` drafts recorded answers of the same model, of which each token is spoiled with
probability 1 - `--acceptances`: what verification and planning make of a given acceptance, **with a
drafter that costs nothing** (`forced_worker`). `ngram` is the server's own, on prompts that repeat
themselves (`repetitive`) and on others (`plain`). Each pair has two engines that are alive at once
and serve the same requests in turns, greedily; wall time is from the last first token to the first
end. `ratio_to_off` is of wall times; `cpu_ratio_to_off`, of the CPU time that workers took for a
token, says the same of a busy machine. Answers must be equal: `equal_answers` is the share of
requests with the same tokens (logits that nearly tie may round otherwise in a batch of another
shape).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import pathlib
import random
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.engine_session import Answer, EngineSession, Prompt, engine_session
from benchmarks.figures import report
from headrace_request.sampling import Sampling

_PROMPT_TOKENS = 64
_PATTERN_TOKENS = 8
_FIRST_ID = 10
_OFF = {"speculate": "off"}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One engine that is compared with one without speculation."""

    drafter: str
    k: str
    batch: int
    # Of forced drafts; None: whatever the drafter achieves.
    acceptance: float | None
    workload: str

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        return {"speculate": "ngram", "speculate_tokens": self.k}

    def program(self, answers: pathlib.Path) -> tuple[str, ...]:
        """Module and first arguments of its backend."""
        if self.acceptance is None:
            return ("headrace_backend",)
        return ("benchmarks.forced_backend", str(self.acceptance), str(answers))


@dataclasses.dataclass(slots=True)
class Turn:
    """What one turn took."""

    tokens_per_s: float
    cpu_s_per_token: float
    answers: list[list[int]]
    steps: float
    drafted: int
    accepted: int


def prompts(workload: str, batch: int, vocab_size: int, num_tokens: int) -> list[Prompt]:
    """Requests of a workload; each has a seed of its own, by which its answer is recorded."""
    rng = random.Random(0)
    made = []
    for seed in range(1, batch + 1):
        if workload == "repetitive":
            pattern = [rng.randrange(_FIRST_ID, vocab_size) for _ in range(_PATTERN_TOKENS)]
            ids = pattern * (_PROMPT_TOKENS // _PATTERN_TOKENS)
        else:
            ids = [rng.randrange(_FIRST_ID, vocab_size) for _ in range(_PROMPT_TOKENS)]
        prompt = Prompt.of(ids, num_tokens)
        sampling = Sampling(temperature=0.0, seed=seed)
        made.append(dataclasses.replace(prompt, sampling=sampling, min_tokens=num_tokens))
    return made


async def serve(session: EngineSession, asked: list[Prompt]) -> list[Answer]:
    """Sends all requests at once and returns when they have ended."""
    return list(await asyncio.gather(*(session.ask(prompt) for prompt in asked)))


async def turn(session: EngineSession, asked: list[Prompt]) -> Turn:
    """One run of all requests."""
    cpu_before = _cpu_s(session)
    answers = await serve(session, asked)
    cpu_s = _cpu_s(session) - cpu_before
    begin_s = max(answer.arrivals_s[0] for answer in answers)
    end_s = min(answer.arrivals_s[-1] for answer in answers)
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
    )


def _cpu_s(session: EngineSession) -> float:
    times = [worker.cpu_times() for worker in session.process.workers()]
    return float(sum(spent.user + spent.system for spent in times))


async def compare(case: Case, engine: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One case in turns with the same engine without speculation."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        file = pathlib.Path(name) / "answers.json"
        async with contextlib.AsyncExitStack() as stack:
            off = await stack.enter_async_context(engine_session(engine | _OFF))
            asked = prompts(case.workload, case.batch, off.model.vocabulary_size, options.tokens)
            recorded = (await turn(off, asked)).answers
            file.write_text(json.dumps(dict(enumerate(recorded, 1))))
            started = engine_session(engine | case.settings, program=case.program(file))
            on = await stack.enter_async_context(started)
            await turn(on, asked)
            pairs = [(await turn(off, asked), await turn(on, asked)) for _ in range(options.repeats)]
            return _row(case, pairs, recorded) | {"device": off.model.device}


def _row(case: Case, pairs: list[tuple[Turn, Turn]], recorded: list[list[int]]) -> dict[str, Any]:
    ratios = [on.tokens_per_s / off.tokens_per_s for off, on in pairs]
    cpu_ratios = [off.cpu_s_per_token / on.cpu_s_per_token for off, on in pairs]
    last = pairs[-1][1]
    equal = statistics.mean([ids == answer for ids, answer in zip(recorded, last.answers, strict=True)])
    return {
        "drafter": case.drafter,
        "k": case.k if case.k == "auto" else int(case.k),
        "batch": case.batch,
        "workload": case.workload,
        "acceptance": case.acceptance if case.acceptance is not None else "measured",
        "ratio_to_off": round(statistics.median(ratios), 3),
        "cpu_ratio_to_off": round(statistics.median(cpu_ratios), 3),
        "off_tok_s": round(statistics.median([off.tokens_per_s for off, _ in pairs]), 1),
        "tokens_per_step": round(len(recorded[0]) / last.steps, 3),
        "draft_tokens": last.drafted,
        "accepted_tokens": last.accepted,
        "equal_answers": round(equal, 3),
    }


def cases(options: argparse.Namespace) -> list[Case]:
    """All cases that the options name."""
    found = []
    for drafter in options.drafters:
        forced = drafter == "forced"
        kinds = (
            [(share, "plain") for share in options.acceptances] if forced else [(None, "plain"), (None, "repetitive")]
        )
        for batch in options.batches:
            for acceptance, workload in kinds:
                found += [Case(drafter, k, batch, acceptance, workload) for k in options.ks]
    return found


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, each printed as soon as it is measured."""
    engine = {
        "model": str(options.model),
        "device": options.device,
        "enable_prefix_cache": False,
        "worker_threads": options.threads,
        "max_num_seqs": max(options.batches),
    }
    if options.kv_memory:
        engine["kv_memory"] = options.kv_memory
    rows = []
    for case in cases(options):
        began = time.monotonic()
        rows.append(await compare(case, engine, options))
        print(f"{rows[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    return rows


def _list(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/demo"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafters", type=_list, default=["forced", "ngram"], help="of forced and ngram")
    parser.add_argument("--ks", type=_list, default=["4", "auto"], help="numbers of drafts, and auto")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument(
        "--acceptances", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.8]
    )
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a worker")
    parser.add_argument("--kv-memory", default="", help="of each of the two engines: a GPU has room for both")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    unknown = set(options.drafters) - {"forced", "ngram"}
    if unknown:
        parser.error(f"--drafters: there is no {', '.join(sorted(unknown))}")
    report("speculation", {"rows": asyncio.run(run(options))}, options.json)


if __name__ == "__main__":
    main()
