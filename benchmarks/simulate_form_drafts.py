"""What drafts would bring to rows under a form, beside tokens that the form leaves no choice about.

    python -m benchmarks.simulate_form_drafts [--outputs 32] [--tokens 200] [--drafts 4]

The demo model answers under schemas (`made_schemas`), an object each or a long array of objects,
each token drawn. Then steps are counted in which these same answers come about: with tokens that
must come computed side by side, as the engine does it; with drafts besides, looked up among the
row's own tokens (the longest run of 2 to 8 that stood before, then the latest, as the n-gram
drafter does) and accepted where they equal the answer; and with drafts alone. Drafts would be
verified wherever no token must come. Nothing here takes time: what a step with more masks costs is
measured elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import pathlib
from array import array
from typing import Any, Final

import numpy as np

from benchmarks import figures
from benchmarks.engine_session import Prompt, engine_session
from benchmarks.made_schemas import long_schema, make_schema
from headrace_backend.step.masks import mask_words
from headrace_backend.structured_output.compiler import GrammarCompiler, grammar_compiler
from headrace_model_folder import ModelFolder
from headrace_request.sampling import Sampling
from headrace_request.structured_output import StructuredOutput

DEMO: Final = figures.ROOT / "models" / "demo"
PROMPT: Final = tuple(range(100, 116))
_LONGEST, _SHORTEST = 8, 2
_START_S: Final = 300.0


async def answers(model: pathlib.Path, forms: list[StructuredOutput], num_tokens: int, temperature: float) -> Any:
    """Tokens of an answer under each form."""
    engine = {"model": str(model), "device": "cpu", "max_num_seqs": len(forms), "max_model_len": num_tokens + 64}
    async with engine_session(engine, _START_S) as session:

        async def one(seed: int, form: StructuredOutput) -> list[int]:
            sampling = Sampling(temperature=temperature, seed=seed + 1)
            prompt = Prompt.of(PROMPT, num_tokens)
            prompt = dataclasses.replace(prompt, sampling=sampling, structured_output=form, max_drafts=0)
            return (await session.ask(prompt)).token_ids

        return await asyncio.gather(*(one(seed, form) for seed, form in enumerate(forms)))


def forced_runs(compiler: GrammarCompiler, form: StructuredOutput, tokens: list[int], vocab_size: int) -> list[int]:
    """For each token of an answer how many from it on must come, whatever is drawn."""
    place, words = compiler.compile(form).result().new_output(), np.empty(mask_words(vocab_size), np.int32)
    runs = []
    for position in range(len(tokens)):
        first = max(position - 1, 0)
        outcome = place.fill_mask(words, first, array("i", tokens[first:position]), frozenset(), 0, looks_ahead=True)
        runs.append(len(outcome.forced or ()))
    return runs


def looked_up(known: list[int], num_drafts: int) -> list[int]:
    """What followed the latest of the longest runs that end the row, where they stood before."""
    for length in range(_LONGEST, _SHORTEST - 1, -1):
        end = known[-length:]
        for start in range(len(known) - length - 1, -1, -1):
            if known[start : start + length] == end:
                return known[start + length : start + length + num_drafts]
    return []


def num_steps(tokens: list[int], runs: list[int], skips: bool, num_drafts: int) -> int:
    """Steps in which an answer comes about."""
    position, steps = 0, 0
    while position < len(tokens):
        steps += 1
        if skips and runs[position]:
            # Its first token is drawn, and the others are computed beside it in the next step.
            position += runs[position]
            continue
        drafts = looked_up([*PROMPT, *tokens[:position]], num_drafts) if num_drafts else []
        position += 1
        for draft in drafts:
            if position >= len(tokens) or draft != tokens[position - 1]:
                break
            position += 1
    return steps


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each output")
    parser.add_argument("--drafts", type=int, default=4, help="most drafts of a step")
    parser.add_argument("--model", type=pathlib.Path, default=DEMO)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    folder = ModelFolder.open(options.model)
    compiler = grammar_compiler(folder)
    assert compiler is not None, "the model has a tokenizer"
    texts = {
        "object": [json.dumps(make_schema(seed)) for seed in range(options.outputs)],
        "array": [long_schema(seed, options.tokens) for seed in range(options.outputs)],
    }
    results = []
    for kind, temperature in itertools.product(texts, (0.0, 1.0)):
        forms = [StructuredOutput("json_schema", text) for text in texts[kind]]
        found = asyncio.run(answers(options.model, forms, options.tokens, temperature))
        runs = [
            forced_runs(compiler, form, tokens, folder.config.vocab_size)
            for form, tokens in zip(forms, found, strict=True)
        ]
        total = sum(map(len, found))
        row: dict[str, Any] = {"form": kind, "temperature": temperature, "tokens": total}
        for name, skips, drafts in (
            ("forced", True, 0),
            ("both", True, options.drafts),
            ("drafts", False, options.drafts),
        ):
            steps = sum(num_steps(tokens, own, skips, drafts) for tokens, own in zip(found, runs, strict=True))
            row[f"tokens_per_step_{name}"] = round(total / steps, 3)
        results.append(row)
    compiler.close()
    figures.report("form_drafts", {"results": results}, options.json)


if __name__ == "__main__":
    main()
