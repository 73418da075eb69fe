"""Makes the demo model from nothing by one command.

It makes tokenizer, corpus, target, draft, scores and model card.

    python models/demo/scripts/make.py --out models/demo        # one GPU, about 8 minutes
    python models/demo/scripts/make.py --out /tmp/demo --smoke  # a minute on a CPU

Owns the order of the steps and the settings of the two trainings. With `--tar` the folders are also
written as `target.tar` and `draft.tar`, for machines that hand back few files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tarfile
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from demo_model import DemoModel, ModelShape, draft_shape, save_folder, target_shape
from demo_shards import start_writers
from evaluate import evaluate, print_scores
from train import Compiler, Rows, Schedule, draft_loss, target_loss, train
from train_tokenizer import train_tokenizer, write_tokenizer

VOCAB_SIZE = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Plan:
    """Sizes of one making."""

    target: ModelShape
    draft: ModelShape
    target_schedule: Schedule
    draft_schedule: Schedule
    shards: int
    rows_per_shard: int
    tokenizer_documents: int
    evaluation_scale: float


def full_plan(minutes: float, draft_minutes: float, seed: int) -> Plan:
    """The making that is committed: about 520 M corpus tokens, read about twice."""
    target = Schedule(seconds=60 * minutes, max_steps=100_000, batch_rows=96, seed=seed)
    draft = replace(target, seconds=60 * draft_minutes, decay_share=0.6)
    shapes = target_shape(VOCAB_SIZE), draft_shape(VOCAB_SIZE)
    return Plan(
        *shapes, target, draft, shards=1000, rows_per_shard=512, tokenizer_documents=60_000, evaluation_scale=1.0
    )


def smoke_plan(steps: int, seed: int) -> Plan:
    """A few steps of a tiny model, to try the whole command on a CPU."""
    tiny = replace(target_shape(VOCAB_SIZE), hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    schedule = Schedule(seconds=120, max_steps=steps, batch_rows=4, warmup_steps=2, seed=seed)
    draft = replace(tiny, num_hidden_layers=1)
    return Plan(
        tiny, draft, schedule, schedule, shards=2, rows_per_shard=16, tokenizer_documents=2000, evaluation_scale=0.02
    )


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)


def _prepare_device(name: str) -> torch.device:
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs uncompiled
    # two models, two row lengths, with and without gradient
    torch._dynamo.config.recompile_limit = 64
    return torch.device(name)


def _train_both(
    plan: Plan, device: torch.device, compiler: Compiler, shard_folder: Path, out: Path
) -> dict[str, object]:
    """Trains target and draft and saves their folders."""
    torch.manual_seed(plan.target_schedule.seed)
    target = DemoModel(plan.target).to(device)
    compiler.layers(target)
    rows = Rows(shard_folder, plan.shards, plan.target_schedule.seed)
    record: dict[str, object] = {}
    record["target"] = train(target, target_loss(target, compiler), rows, plan.target_schedule, "target")
    save_folder(target, out)
    draft = DemoModel(plan.draft).to(device)
    compiler.layers(draft)
    rows = Rows(shard_folder, plan.shards, plan.target_schedule.seed + 1)
    record["draft"] = train(draft, draft_loss(draft, target, compiler), rows, plan.draft_schedule, "draft")
    save_folder(draft, out / "draft")
    return record


def make(plan: Plan, out: Path, device: torch.device, compiler: Compiler, processes: int) -> dict[str, object]:
    """Runs every step and returns the scores."""
    started = time.monotonic()
    seed = plan.target_schedule.seed
    _say(started, "tokenizer")
    write_tokenizer(train_tokenizer(plan.tokenizer_documents, VOCAB_SIZE, seed), out)
    for name in TOKENIZER_FILES:
        (out / "draft").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(out / name, out / "draft" / name)
    with tempfile.TemporaryDirectory() as shard_folder:
        _say(started, f"corpus: {plan.shards} shards by {processes} processes; training starts with the first")
        writers = start_writers(
            out / "tokenizer.json",
            Path(shard_folder),
            seed=seed,
            shards=plan.shards,
            rows=plan.rows_per_shard,
            processes=processes,
        )
        try:
            record = _train_both(plan, device, compiler, Path(shard_folder), out)
        finally:
            for writer in writers:
                writer.terminate()
                writer.wait()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    date = datetime.now(UTC).date().isoformat()
    record |= {"device": name, "torch": torch.__version__, "seed": seed, "date": date, "command": _command(plan)}
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    _say(started, f"trained: {json.dumps(record)}")
    scores = evaluate(out, device, plan.evaluation_scale)
    print_scores(scores)
    _say(started, "done")
    return scores


def _command(plan: Plan) -> str:
    minutes = f"--minutes {plan.target_schedule.seconds / 60:g} --draft-minutes {plan.draft_schedule.seconds / 60:g}"
    return f"python models/demo/scripts/make.py --out models/demo {minutes} --seed {plan.target_schedule.seed}"


def pack(folder: Path, out: Path) -> None:
    """Writes target.tar and draft.tar of the folder and copies what one wants to read at once."""
    out.mkdir(parents=True, exist_ok=True)
    for archive, members in (("target.tar", sorted(folder.glob("*.*"))), ("draft.tar", [folder / "draft"])):
        with tarfile.open(out / archive, "w") as tar:
            for member in members:
                tar.add(member, arcname=str(member.relative_to(folder)))
    for name in ("README.md", "eval.json", "training.json"):
        shutil.copyfile(folder / name, out / name)


def _spare_cores() -> int:
    return max(1, min(14, len(os.sched_getaffinity(0)) - 2))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the demo model from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--tar", action="store_true", help="write target.tar and draft.tar to --out instead of folders")
    parser.add_argument("--minutes", type=float, default=6.2, help="training time of the target")
    parser.add_argument("--draft-minutes", type=float, default=0.9, help="training time of the draft")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=_spare_cores(), help="corpus processes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few steps, to try the command")
    parser.add_argument("--smoke-steps", type=int, default=12)
    options = parser.parse_args()
    plan = smoke_plan(options.smoke_steps, options.seed) if options.smoke else full_plan(
        options.minutes, options.draft_minutes, options.seed
    )  # fmt: skip
    device, compiler = _prepare_device(options.device), Compiler(not options.no_compile)
    if not options.tar:
        make(plan, options.out, device, compiler, options.processes)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(plan, Path(folder), device, compiler, options.processes)
        pack(Path(folder), options.out)


if __name__ == "__main__":
    main()
