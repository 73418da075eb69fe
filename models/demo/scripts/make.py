"""Makes the demo model by one command, from nothing or from a model that it made before.

It makes tokenizer, corpus, target, draft, scores and model card.

    python models/demo/scripts/make.py --out models/demo        # one GPU, about 8 minutes
    python models/demo/scripts/make.py --out NEW --start models/demo --minutes 4  # further
    python models/demo/scripts/make.py --out NEW --start models/demo --minutes 0  # the draft alone
    python models/demo/scripts/make.py --out /tmp/demo --smoke  # a minute on a CPU

Owns the order of the steps and the settings of the trainings. A model that is trained further keeps
its tokenizer, and its record (`training.json`) keeps those of the trainings before. With `--tar`
the folders are also written as `target.tar` and `draft.tar`, for machines that hand back few files.
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
from demo_model import DemoModel, ModelShape, draft_shape, load_folder, save_folder, target_shape
from demo_shards import start_writers
from evaluate import evaluate, print_scores
from train import Compiler, Rows, Schedule, draft_loss, target_loss, train
from train_tokenizer import train_tokenizer, write_tokenizer

VOCAB_SIZE = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Plan:
    """Sizes of one making.

    Attributes:
        start: Folder of a model that is trained further; None to begin with random weights.
        keep: Share of the start's weights in the target's last ones; the rest is what was trained.
    """

    target: ModelShape
    draft: ModelShape
    target_schedule: Schedule
    draft_schedule: Schedule
    shards: int
    rows_per_shard: int
    tokenizer_documents: int
    evaluation_scale: float
    start: Path | None = None
    keep: float = 0.0


def full_plan(minutes: float, draft_minutes: float, seed: int) -> Plan:
    """The making that is committed: about 520 M corpus tokens, read about twice."""
    target = Schedule(seconds=60 * minutes, max_steps=100_000, batch_rows=96, seed=seed)
    draft = replace(target, seconds=60 * draft_minutes, decay_share=0.6)
    shapes = target_shape(VOCAB_SIZE), draft_shape(VOCAB_SIZE)
    return Plan(
        *shapes, target, draft, shards=1000, rows_per_shard=512, tokenizer_documents=60_000, evaluation_scale=1.0
    )


def further_plan(plan: Plan, start: Path, keep: float) -> Plan:
    """The plan for weights that were trained before.

    They begin at half of the usual rates, which then fall for most of the run. A short training
    forgets some of what the start knew; an average with the start has it again, and keeps most of
    what was learned.
    """

    def gentler(schedule: Schedule) -> Schedule:
        rates = {"muon_rate": schedule.muon_rate / 2, "adam_rate": schedule.adam_rate / 2}
        return replace(schedule, decay_share=0.7, **rates)

    schedules = gentler(plan.target_schedule), gentler(plan.draft_schedule)
    return replace(plan, start=start, keep=keep, target_schedule=schedules[0], draft_schedule=schedules[1])


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


def _first_weights(plan: Plan, folder: str, shape: ModelShape, device: torch.device) -> DemoModel:
    """The model to train: random weights of the shape, or those of the plan's folder, in fp32."""
    if plan.start is None:
        return DemoModel(shape).to(device)
    return load_folder(plan.start / folder, device, torch.float32).train()


def _prepare_tokenizer(plan: Plan, out: Path) -> None:
    """Writes the tokenizer's files for target and draft: those of the start, or newly trained."""
    (out / "draft").mkdir(parents=True, exist_ok=True)
    if plan.start is None:
        seed = plan.target_schedule.seed
        write_tokenizer(train_tokenizer(plan.tokenizer_documents, VOCAB_SIZE, seed), out)
    for name in TOKENIZER_FILES:
        if plan.start is not None and plan.start.resolve() != out.resolve():
            shutil.copyfile(plan.start / name, out / name)
        shutil.copyfile(out / name, out / "draft" / name)


def _record_before(plan: Plan) -> list[dict[str, object]]:
    """The records of the trainings before this one, the oldest first."""
    if plan.start is None:
        return []
    record = json.loads((plan.start / "training.json").read_text())
    return [*record.pop("before", []), record]


def _train_both(
    plan: Plan, device: torch.device, compiler: Compiler, shard_folder: Path, out: Path
) -> dict[str, object]:
    """Trains target and draft and saves their folders."""
    torch.manual_seed(plan.target_schedule.seed)
    target = _first_weights(plan, "", plan.target, device)
    compiler.layers(target)
    rows = Rows(shard_folder, plan.shards, plan.target_schedule.seed)
    record: dict[str, object] = {}
    if plan.target_schedule.seconds > 0:
        record["target"] = train(target, target_loss(target, compiler), rows, plan.target_schedule, "target")
    save_folder(target, out)
    draft = _first_weights(plan, "draft", plan.draft, device)
    compiler.layers(draft)
    rows = Rows(shard_folder, plan.shards, plan.target_schedule.seed + 1)
    record["draft"] = train(draft, draft_loss(draft, target, compiler), rows, plan.draft_schedule, "draft")
    save_folder(draft, out / "draft")
    if plan.keep:
        # Last, so that the draft has learned from what was trained alone.
        _blend(target, _first_weights(plan, "", plan.target, device), plan.keep)
        save_folder(target, out)
    return record


def _blend(model: DemoModel, start: DemoModel, keep: float) -> None:
    """Makes the model's weights those of an average with the start's, in place."""
    with torch.no_grad():
        for weight, first in zip(model.parameters(), start.parameters(), strict=True):
            weight.lerp_(first, keep)


def make(plan: Plan, out: Path, device: torch.device, compiler: Compiler, processes: int) -> dict[str, object]:
    """Runs every step and returns the scores."""
    started = time.monotonic()
    seed = plan.target_schedule.seed
    _say(started, "tokenizer")
    _prepare_tokenizer(plan, out)
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
    record["before"] = _record_before(plan)
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    _say(started, f"trained: {json.dumps(record)}")
    scores = evaluate(out, device, plan.evaluation_scale)
    print_scores(scores)
    _say(started, "done")
    return scores


def _command(plan: Plan) -> str:
    minutes = f"--minutes {plan.target_schedule.seconds / 60:g} --draft-minutes {plan.draft_schedule.seconds / 60:g}"
    start = f" --start {plan.start}" if plan.start is not None else ""
    start += f" --keep {plan.keep:g}" if plan.keep else ""
    return f"python models/demo/scripts/make.py --out models/demo{start} {minutes} --seed {plan.target_schedule.seed}"


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
    parser.add_argument("--minutes", type=float, default=6.2, help="training time of the target; 0 leaves it as it is")
    parser.add_argument("--draft-minutes", type=float, default=0.9, help="training time of the draft")
    parser.add_argument("--start", type=Path, help="folder of a model to train further, with its tokenizer")
    parser.add_argument("--keep", type=float, default=0.0, help="share of the weights of --start in the last ones")
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
    if options.minutes == 0 and options.start is None:
        parser.error("--minutes 0 leaves the target as it is, and needs --start")
    if options.keep and (options.start is None or not 0 < options.keep < 1):
        parser.error("--keep is above 0 and below 1, and needs --start")
    if options.start is not None:
        plan = further_plan(plan, options.start, options.keep)
    device, compiler = _prepare_device(options.device), Compiler(not options.no_compile)
    if not options.tar:
        make(plan, options.out, device, compiler, options.processes)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(plan, Path(folder), device, compiler, options.processes)
        pack(Path(folder), options.out)


if __name__ == "__main__":
    main()
