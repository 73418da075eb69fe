"""`headrace plan`: sizes are those that workers plan, times those that were measured.

What can't be is said with the reason.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import write_checkpoint
from tests.support import mtp_models
from tests.support.eagle_heads import head_config
from tests.support.model_builds import weight_memory
from tests.support.running_server import DEMO, environment

from headrace_backend.weights.placement import Shard
from headrace_backend.worker.start_up.plan_sizes import Question, answers
from headrace_model_folder import ModelFolder
from headrace_supervisor.plan import command as plan_command
from headrace_supervisor.plan.capacity import GPUS, PRODUCTS, Demand, RankSizes, exchange_s, predict, step_s
from headrace_supervisor.plan.command import plan

# Llama-3.1-8B in bf16 on one card, 70B in FP8 on four, caches in bf16.
ONE_8B = RankSizes(1, 32, 8192, 2 * 7_504_000_000, 7_504_000_000, 131_072, 900_000, 512)
FOUR_70B = RankSizes(
    4,
    80,
    16_384,
    (68_450_000_000 + 2 * 1_051_000_000) // 4,
    69_501_000_000 // 4,
    81_920,
    1_500_000,
    512,
    PRODUCTS["fp8"],
)


def run(*arguments: str) -> Result:
    return CliRunner(env=environment()).invoke(plan, list(arguments))


@pytest.fixture
def answered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions to the process that knows are answered in this one, which has imported torch.

    `test_every_number_of_ranks_has_its_row` asks the process.
    """
    monkeypatch.setattr(plan_command, "_asked", lambda question: _answered(msgspec.json.encode(question)))


@functools.cache
def _answered(question: bytes) -> list[dict[str, Any]]:
    """What the process would answer; a table asks what JSON did, and a rank takes 0.3 s."""
    found: list[dict[str, Any]] = msgspec.to_builtins(answers(msgspec.json.decode(question, type=Question)))
    return found


@pytest.mark.usefixtures("answered_here")
def test_groups_that_do_not_divide_are_refused_on_any_number_of_ranks() -> None:
    ended = run("--model", str(DEMO), "--gpus", "4", "--quantize", "int4", "--users", "8", "--json")
    assert ended.exit_code == 1 and "quantize_group is 128" in json.loads(ended.output)[0]["refused"]


@pytest.mark.usefixtures("answered_here")
def test_rotary_tables_have_a_column_of_their_own_and_every_rank_has_them_whole() -> None:
    """131,072 tokens of Llama-3.1, of heads of 128 in fp32, whatever shares them out."""
    asked = ("--shape", "llama-3.1-8b", "--gpus", "4", "--users", "8")
    rows = json.loads(run(*asked, "--json").output)
    assert [row["rotary_bytes"] for row in rows] == [131_072 * 128 * 4] * 3
    [staged] = json.loads(run(*asked, "--pp", "4", "--json").output)
    assert staged["rotary_bytes"] == 131_072 * 128 * 4
    [short] = json.loads(run(*asked[:2], "--max-model-len", "8192", "--json").output)
    assert short["rotary_bytes"] == 8_192 * 128 * 4
    titles, _, alone, *_ = (line.split() for line in run(*asked).output.splitlines() if line.strip())
    assert (titles[2:4], alone[2:4]) == (["weights", "rotary"], ["15.0", "0.1"])


@pytest.mark.slow  # Single numbers of ranks are planned above.
def test_every_number_of_ranks_has_its_row() -> None:
    ended = run("--model", str(DEMO), "--gpus", "4", "--users", "8", "--json")
    assert ended.exit_code == 0
    rows = json.loads(ended.output)
    config = ModelFolder.open(DEMO, require_weights=False).config
    for row, tp in zip(rows, (1, 2, 4), strict=True):
        weights = weight_memory(config, torch.bfloat16, None, torch.device("cpu"), Shard(0, tp)).weights
        assert (row["tp"], row["replicas"], row["weight_bytes"]) == (tp, 4 // tp, weights)
        assert row["holds"] and row["kv_token_bytes"] == 2 * 8 * 4 * 32 * 2 // tp
        # The cache gets what is left by the reserve, by the driver's GiB and, of several ranks, by
        # half a GiB of the group.
        parts = ("weight_bytes", "rotary_bytes", "activation_bytes", "graph_bytes", "kv_cache_bytes")
        taken = sum(row[name] for name in parts)
        card = GPUS["h200"].memory_bytes
        left = card - int(0.0075 * card) - (1 << 30) - (0 if tp == 1 else 1 << 29) - taken
        assert 0 <= left < 16 * row["kv_token_bytes"]


@pytest.mark.usefixtures("answered_here")
def test_stages_hold_what_one_card_does_not() -> None:
    def rows(*options: str) -> list[dict[str, Any]]:
        found = run("--shape", "llama-3.1-70b", "--gpus", "4", "--max-model-len", "8192", "--json", *options)
        rows: list[dict[str, Any]] = json.loads(found.output)
        return rows

    alone, two, four = rows()
    stages, staged_ranks = rows("--pp", "2")
    assert alone["refused"] and not stages["refused"]
    assert (stages["pp"], stages["tp"], stages["replicas"]) == (2, 1, 2)
    assert (staged_ranks["pp"], staged_ranks["tp"], staged_ranks["replicas"]) == (2, 2, 1)
    # Half of the layers, and the embedding or the output layer; of norms each rank has all.
    assert stages["weight_bytes"] == pytest.approx(two["weight_bytes"], rel=1e-3)
    assert staged_ranks["weight_bytes"] == pytest.approx(four["weight_bytes"], rel=1e-3)
    # A step reads all stages; a token has keys and values in all of them.
    assert stages["read_bytes"] == pytest.approx(2 * two["read_bytes"], rel=1e-3)
    assert stages["kv_token_bytes"] == 2 * two["kv_token_bytes"]


@pytest.mark.usefixtures("answered_here")
def test_stages_that_can_not_be_are_refused() -> None:
    ended = run("--model", str(DEMO / "draft"), "--gpus", "4", "--pp", "4", "--max-model-len", "1024", "--json")
    assert ended.exit_code == 1
    [row] = json.loads(ended.output)
    assert row["refused"] == "pp is 4, and the model has 2 layers: pp of at most 2 works"
    few = run("--shape", "llama-3.1-8b", "--gpus", "2", "--pp", "4")
    assert few.exit_code == 2
    assert few.stderr == "headrace: --pp is 4, and each stage needs a GPU of the 2 of --gpus\n"


def test_stages_share_the_rows_and_read_all_weights() -> None:
    """With half of the rows at a time and both stages after each other."""
    two = FOUR_70B._replace(pp=2)
    assert step_s(two, GPUS["h200"], 2, 1000) == step_s(FOUR_70B, GPUS["h200"], 1, 1000)


@pytest.mark.usefixtures("answered_here")
def test_drafting_takes_memory_from_the_cache_and_needs_all_layers_on_one_stage() -> None:
    def row(*flags: str) -> dict[str, Any]:
        ended = run("--shape", "llama-3.1-8b", "--max-model-len", "8192", "--json", *flags)
        [row] = json.loads(ended.output)
        return row

    off, ngram = row(), row("--speculate", "ngram")
    # A token history of 4 bytes for each of 512 rows and 8,192 positions, and what drafts are
    # drawn with.
    assert ngram["kv_tokens"] <= off["kv_tokens"] - 512 * 8192 * 4 / off["kv_token_bytes"]
    staged = run("--shape", "llama-3.1-8b", "--speculate", "ngram", "--gpus", "2", "--pp", "2")
    assert staged.exit_code == 2
    refusal = "--speculate ngram needs --pp 1: drafts are verified where one stage has all layers"
    assert staged.stderr == f"headrace: {refusal}\n"


@pytest.mark.usefixtures("answered_here")
def test_a_quantized_cache_holds_more() -> None:
    def row(kv_dtype: str) -> dict[str, int]:
        ended = run("--shape", "llama-3.1-8b", "--kv-dtype", kv_dtype, "--max-model-len", "8192", "--json")
        assert ended.exit_code == 0
        [row] = json.loads(ended.output)
        return row

    plain, fp8 = row("auto"), row("fp8")
    assert (plain["kv_token_bytes"], fp8["kv_token_bytes"]) == (131_072, 67_584)
    assert fp8["kv_tokens"] > 1.9 * plain["kv_tokens"]


@pytest.mark.usefixtures("answered_here")
def test_a_draft_model_takes_its_part_of_the_memory_on_every_rank() -> None:
    def rows(*options: str) -> list[dict[str, int]]:
        ended = run("--model", str(DEMO), "--gpus", "2", "--json", *options)
        assert ended.exit_code == 0
        found: list[dict[str, int]] = json.loads(ended.output)
        return found

    draft = ModelFolder.open(DEMO / "draft", require_weights=False).config
    weights = weight_memory(draft, torch.bfloat16, None, torch.device("cpu"), Shard(0, 1)).weights
    for alone, both in zip(rows(), rows("--draft-model", str(DEMO / "draft")), strict=True):
        assert both["weight_bytes"] - alone["weight_bytes"] == weights
        assert both["kv_token_bytes"] - alone["kv_token_bytes"] == 2 * 2 * 2 * 32 * 2
        assert both["kv_tokens"] < alone["kv_tokens"]


@pytest.mark.usefixtures("answered_here")
def test_a_head_takes_its_part_of_the_memory_on_every_rank(tmp_path: pathlib.Path) -> None:
    """For Llama-3.1-8B, a state of 8 KiB beside 4 KiB of keys and values."""

    def row(*options: str) -> dict[str, int]:
        ended = run("--shape", "llama-3.1-8b", "--max-model-len", "8192", "--json", *options)
        assert ended.exit_code == 0
        [found] = json.loads(ended.output)
        return dict(found)

    path = tmp_path / "config.json"
    path.write_text(json.dumps(head_config(plan_command._SHAPES["llama-3.1-8b"], 32_000, (2, 16, 29))))
    alone, both = row(), row("--draft-model", str(tmp_path))
    layer = 2 * 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336
    assert both["weight_bytes"] - alone["weight_bytes"] == 2 * (layer + 3 * 4096 * 4096 + 32_000 * 4096 + 4 * 4096)
    assert both["kv_token_bytes"] - alone["kv_token_bytes"] == 12 << 10
    assert both == row("--draft-model", str(tmp_path), "--speculate", "eagle")


@pytest.mark.usefixtures("answered_here")
def test_a_head_that_does_not_suit_is_refused(tmp_path: pathlib.Path) -> None:
    def said(config: object, *options: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        ended = run("--model", str(DEMO), "--draft-model", str(tmp_path), *options)
        assert ended.exit_code == 2
        return ended.stderr

    config = head_config(plan_command._SHAPES["llama-3.1-8b"], 32_000, (2, 16, 29))
    other = "is for a vocabulary of 128256 tokens, and the model has one of 4096; they must be the same"
    assert said(config) == f"headrace: --draft-model {other}\n"
    assert "--draft-model is for --speculate eagle, and --speculate is draft" in said(config, "--speculate", "draft")
    assert f"{tmp_path}/config.json: a JSON object was expected" in said([config])
    missing = run("--model", str(DEMO), "--speculate", "eagle")
    assert missing.stderr == "headrace: --speculate eagle needs --draft-model, the head that drafts\n"


@pytest.mark.usefixtures("answered_here")
def test_a_models_own_layer_is_shared_by_ranks_and_counted(tmp_path: pathlib.Path) -> None:
    """Its experts are read as the model's are: those that a step hits."""
    sizes = {name: value for name, value in mtp_models.SIZES.items() if name != "initializer_range"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"architectures": ["Glm4MoeForCausalLM"]}))

    def rows(*options: str) -> list[dict[str, int]]:
        lengths = ("--prompt-tokens", "100", "--output-tokens", "50")
        ended = run("--model", str(tmp_path), "--gpus", "2", *lengths, "--json", *options)
        assert ended.exit_code == 0, ended.stderr
        found: list[dict[str, int]] = json.loads(ended.output)
        return found

    for tp, alone, both in zip((1, 2), rows(), rows("--speculate", "mtp"), strict=True):
        assert both["weight_bytes"] > alone["weight_bytes"]
        # In the dtype of a config.json that states none, heads of 16 and a state of 32.
        assert both["kv_token_bytes"] - alone["kv_token_bytes"] == 4 * (2 * 2 // tp * 16 + 32)
    refused = run("--model", str(DEMO), "--speculate", "mtp")
    assert (refused.exit_code, refused.output) == (2, refused.stderr)
    assert "--speculate is mtp, and the model (LlamaForCausalLM) has no MTP layer to draft with" in refused.stderr


@pytest.mark.usefixtures("answered_here")
def test_a_draft_model_that_does_not_suit_is_refused() -> None:
    other = run("--shape", "llama-3.1-8b", "--draft-model", str(DEMO / "draft"))
    assert (other.exit_code, other.stderr) == (
        2,
        "headrace: --draft-model has a vocabulary of 4096 tokens, and the model of 128256\n",
    )
    staged = run("--model", str(DEMO), "--gpus", "2", "--pp", "2", "--draft-model", str(DEMO / "draft"))
    assert (staged.exit_code, staged.stderr) == (
        2,
        "headrace: --draft-model is for engines of one stage, and --pp is 2\n",
    )


@pytest.mark.usefixtures("answered_here")
def test_an_output_layer_of_8_bits_takes_and_reads_half() -> None:
    def rows(head: str) -> list[dict[str, int]]:
        options = ("--gpus", "2", "--quantize", "int4", "--quantize-head", head, "--max-model-len", "8192", "--json")
        ended = run("--shape", "llama-3.1-8b", *options)
        assert ended.exit_code == 0
        found: list[dict[str, int]] = json.loads(ended.output)
        return found

    for plain, low in zip(rows("off"), rows("int8"), strict=True):
        saved = 128_256 * (4096 - 4) // plain["tp"]
        assert plain["weight_bytes"] - low["weight_bytes"] == plain["read_bytes"] - low["read_bytes"] == saved
    # Tied, it has a copy of its own, and the table is not read any more.
    tied = [
        json.loads(run("--model", str(DEMO), "--quantize-head", head, "--json").output)[0] for head in ("off", "int8")
    ]
    config = ModelFolder.open(DEMO, require_weights=False).config
    copy = config.vocab_size * (config.description.hidden_size + 4)
    assert config.description.head.tied and tied[1]["weight_bytes"] - tied[0]["weight_bytes"] == copy
    assert (
        tied[0]["read_bytes"] - tied[1]["read_bytes"] == 2 * config.vocab_size * config.description.hidden_size - copy
    )


@pytest.mark.usefixtures("answered_here")
def test_a_model_that_does_not_fit_is_said_with_the_arithmetic() -> None:
    ended = run("--shape", "llama-3.1-70b", "--gpu", "h100", "--gpus", "2")
    assert ended.exit_code == 1
    assert "tp 1: weights 134,570.5 MiB" in ended.output and "refused" in ended.output


@pytest.mark.slow  # The tests above ask for single combinations.
@pytest.mark.usefixtures("answered_here")
def test_any_says_which_weights_and_caches_hold() -> None:
    options = (
        "--shape",
        "llama-3.1-70b",
        "--gpus",
        "2",
        "--users",
        "200",
        "--think-s",
        "20",
        "--max-model-len",
        "8192",
    )
    plain = run(*options, "--json", "--target-itl-ms", "26")
    assert plain.exit_code == 1
    assert "--quantize any --kv-dtype any" in run(*options, "--target-itl-ms", "26").output
    asked = (*options, "--target-itl-ms", "26", "--quantize", "any", "--kv-dtype", "any")
    rows = json.loads(run(*asked, "--json").output)
    kinds = [(row["quantize"], row["kv_dtype"], row["tp"]) for row in rows]
    assert len(set(kinds)) == len(rows) == 5 * 3 * 2
    # Each as if it had been asked for alone.
    assert [row for row in rows if (row["quantize"], row["kv_dtype"]) == ("off", "auto")] == json.loads(plain.output)
    alone = run(*options, "--target-itl-ms", "26", "--quantize", "fp8", "--kv-dtype", "int8", "--json")
    assert json.loads(alone.output) == [row for row in rows if row["quantize"] == "fp8" and row["kv_dtype"] == "int8"]
    holding = [row for row in rows if row["holds"]]
    assert 0 < len(holding) < len(rows) and all(row["itl_ms"] <= 26 for row in holding)
    table = run(*asked)
    assert table.exit_code == 0
    assert sum(line.strip().endswith(" holds") for line in table.output.splitlines()) == len(holding)
    assert "too slow" not in table.output and "users wait" not in table.output
    quickest = min(holding, key=lambda row: float(row["answer_s"]))
    named = f"tp {quickest['tp']}, {quickest['quantize']}, KV {quickest['kv_dtype']}"
    assert f"the quickest is {named} ({quickest['answer_s']} s)" in table.output


@pytest.mark.parametrize("option", ["--think-s", "--target-itl-ms"])
def test_nan_is_no_time(option: str) -> None:
    ended = run("--shape", "llama-3.1-8b", option, "nan")
    assert ended.exit_code == 2 and option in ended.output and "nan" in ended.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--max-model-len", "131073"), "--max-model-len is 131073; the model's context has 131072 tokens"),
        (
            ("--prompt-tokens", "131000", "--output-tokens", "73"),
            "prompts of 131000 tokens and answers of 73 are 131073, and a request has at most 131072",
        ),
        (("--max-model-len", "700"), "prompts of 512 tokens and answers of 256 are 768, and a request has at most 700"),
    ],
)
def test_requests_that_a_server_refuses_are_no_plan(arguments: tuple[str, ...], reason: str) -> None:
    ended = run("--shape", "llama-3.1-8b", *arguments)
    assert ended.exit_code == 2 and reason in ended.output


@pytest.mark.usefixtures("answered_here")
def test_a_row_is_one_line_however_large_its_numbers() -> None:
    ended = run("--shape", "llama-3.1-8b", "--gpus", "8", "--users", "1000000", "--max-model-len", "8192")
    lines = [line for line in ended.output.splitlines() if line.strip().endswith("users wait")]
    assert ended.exit_code == 1 and len(lines) == 4 and "1,000,000" in lines[-1]


def test_one_of_shape_and_model_is_needed() -> None:
    for arguments in ((), ("--shape", "llama-3.1-8b", "--model", str(DEMO))):
        ended = run(*arguments)
        assert ended.exit_code == 2 and "one of MODEL and --shape is needed" in ended.output


def test_a_folder_that_is_not_here_or_is_no_model_is_refused(tmp_path: pathlib.Path) -> None:
    for folder, reason in (
        ("/nowhere", "there is no folder /nowhere here"),
        (str(tmp_path), f"{tmp_path}/config.json: No such file or directory"),
    ):
        ended = run("--model", folder)
        assert ended.exit_code == 2 and reason in ended.output and "Errno" not in ended.output


def test_steps_take_what_they_took() -> None:
    h200 = GPUS["h200"]
    two, four = (
        ONE_8B._replace(
            tp=tp, read_bytes=ONE_8B.read_bytes // tp, multiplied=ONE_8B.multiplied // tp, kv_token_bytes=131_072 // tp
        )
        for tp in (2, 4)
    )
    # docs/operations.md: one row behind 640 tokens.
    for rank_sizes, measured_ms in ((ONE_8B, 4.09), (two, 2.78), (four, 1.63), (FOUR_70B, 6.61)):
        assert step_s(rank_sizes, h200, 1, 640) * 1e3 == pytest.approx(measured_ms, rel=0.1)
    # And what can't be is not said: the published floor of 32 rows behind 1,024.
    assert step_s(ONE_8B, h200, 32, 1024) > 4.49e-3


def test_more_tokens_take_ranks_longer_to_exchange() -> None:
    times = [exchange_s(FOUR_70B, tokens) for tokens in (0, 1, 256, 8192)]
    assert times == sorted(times) and times[0] > 0
    # 128 MiB are a bandwidth, not a latency.
    assert times[3] > 50 * times[0]
    assert exchange_s(ONE_8B, 8192) == 0.0
    assert exchange_s(FOUR_70B._replace(tp=3), 1) == exchange_s(FOUR_70B, 1)


@given(
    users=st.integers(1, 5000),
    prompt=st.integers(1, 4000),
    output=st.integers(1, 2000),
    think_s=st.floats(0, 100),
)
def test_a_balance_is_one(users: int, prompt: int, output: int, think_s: float) -> None:
    demand = Demand(users, prompt, output, think_s)
    found = predict(ONE_8B, GPUS["h200"], demand)
    assert found.rows_held == min(900_000 // (prompt + output), 512)
    assert 0 < found.active <= users * 1.000001
    assert found.itl_ms >= 1e3 * step_s(ONE_8B, GPUS["h200"], 0, 0)
    assert found.active == pytest.approx(users * found.answer_s / (found.answer_s + think_s))
    # More users never have it faster.
    more = predict(ONE_8B, GPUS["h200"], demand._replace(users=2 * users))
    assert more.answer_s >= found.answer_s * 0.999


def test_rows_beyond_the_cache_wait() -> None:
    small = ONE_8B._replace(kv_tokens=8000)
    held = predict(small, GPUS["h200"], Demand(10, 500, 300, 0.0))
    assert held.rows_held == 10 and not held.is_overloaded
    crowd = predict(small, GPUS["h200"], Demand(40, 500, 300, 0.0))
    assert crowd.is_overloaded and crowd.answer_s > 3 * held.answer_s


def test_rows_beyond_a_step_wait_though_the_cache_would_hold_them() -> None:
    demand = Demand(600, 100, 100, 0.0)
    assert not predict(ONE_8B._replace(max_num_seqs=1024), GPUS["h200"], demand).is_overloaded
    crowd = predict(ONE_8B, GPUS["h200"], demand)
    assert crowd.rows_held == 512 and crowd.is_overloaded


# 128 experts of 768 inner elements, of which 8 compute a token, in every layer.
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "torch_dtype": "bfloat16", "norm_topk_prob": True,
}  # fmt: skip


WHOLE_EXPERTS = {"load": "dummy", "expert_parallel": True}


def test_a_mixture_reads_the_experts_that_a_step_hits() -> None:
    expert_weights = 48 * 128 * 3 * 2048 * 768
    for engine, bytes_each in ({}, 2), ({"quantize": "int4"}, 0.5), ({"tp": 4}, 0.5):
        question = Question(QWEN3_30B_A3B, [{**engine, "load": "dummy"}], 140 << 30, [int(engine.get("tp", 1))])
        (sizes,) = answers(question)
        assert not sizes.refused and sizes.expert_bytes == int(expert_weights * bytes_each)
        assert sizes.expert_share == 1 / 16
        # What computes a token is a tenth of 30.5 billion weights.
        assert 3.0e9 < sizes.multiplied * sizes.tp < 3.1e9
    by_parts, whole = answers(Question(QWEN3_30B_A3B, [{"load": "dummy"}, WHOLE_EXPERTS], 140 << 30, [2]))
    assert (whole.weight_bytes, whole.expert_bytes) == (by_parts.weight_bytes, by_parts.expert_bytes)
    # A step holds all inner elements of a token's experts on one rank where all of them are there.
    assert whole.activation_bytes > by_parts.activation_bytes
    (alone,) = answers(Question(QWEN3_30B_A3B, [WHOLE_EXPERTS], 140 << 30, [1]))
    assert "expert_parallel deals experts out to several; tp 2, 4, 8 work" in alone.refused
    ranks = RankSizes(1, 48, 4096, 60_000, 1, 1, 1, 1, expert_bytes=58_000, expert_share=1 / 16)
    assert ranks.read_by(1) == pytest.approx(2_000 + 58_000 / 16)
    assert ranks.read_by(256) == pytest.approx(60_000, rel=1e-4)
    assert step_s(ranks, GPUS["h200"], 1, 0) < step_s(ranks, GPUS["h200"], 8, 0)


# As Qwen3.5 9B: most fields are the family's defaults.
QWEN3_5_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12_288, "vocab_size": 248_320,
    "num_hidden_layers": 32, "num_attention_heads": 16, "max_position_embeddings": 262_144, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_rows_of_recurrent_layers_have_states_beside_the_cache() -> None:
    engines = [{"load": "dummy", "max_model_len": 8192, "max_num_seqs": rows} for rows in (64, 512)]
    few, many = answers(Question(QWEN3_5_9B, engines, 80 << 30, [1]))
    row = 24 * 4 * (32 * 128 * 128 + 4 * 8192)
    assert few.row_state_bytes == row and few.state_bytes == 65 * row
    # As many kept states as rows, or as an eighth of the memory holds that is left.
    assert few.num_checkpoints == 64 and few.checkpoint_bytes == 64 * row
    assert 0 < many.num_checkpoints < 150 and many.checkpoint_bytes == many.num_checkpoints * row
    # Keys and values of 8 of the 32 layers.
    assert few.kv_token_bytes == 8 * 2 * 4 * 256 * 2
    assert many.state_bytes == 513 * row and many.kv_cache_bytes < few.kv_cache_bytes - 300 * row
    (too_many,) = answers(Question(QWEN3_5_9B, engines[1:], 40 << 30, [1]))
    assert "states of recurrent layers 26,163.0 MiB" in too_many.refused
    assert "with max_num_seqs 256 leaves room for a cache" in too_many.refused
    (stages,) = answers(Question(QWEN3_5_9B, [{**engines[0], "pp": 2}], 80 << 30, [1]))
    assert stages.row_state_bytes == row and stages.state_bytes == 65 * row // 2
    assert stages.num_checkpoints == 64 and stages.checkpoint_bytes == 64 * row // 2
    # Inputs of 8 + 3 tokens; keys, values and two logits a head in 9 places; a number a head.
    drafting = {"speculate": "ngram", "speculate_tokens": "4"}
    (drafted,) = answers(Question(QWEN3_5_9B, [{**engines[0], **drafting}], 80 << 30, [1]))
    line = 32 * 128 * 128 + 11 * 8192 + 9 * (6144 + 64) + 32
    assert drafted.row_state_bytes == row and drafted.state_bytes == 65 * 24 * 4 * line
    (shared,) = answers(Question(QWEN3_5_9B, engines[:1], 80 << 30, [2]))
    assert shared.row_state_bytes == row // 2 and shared.state_bytes == 65 * row // 2
    sizes = RankSizes(1, 32, 8192, 1, 1, 1, 1, 1)
    stateful = sizes._replace(row_state_bytes=row)
    assert step_s(stateful, GPUS["h200"], 64, 0) > step_s(sizes, GPUS["h200"], 64, 0)


# As published: most fields of the text part are the family's defaults.
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "vision_config": {},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip


@pytest.mark.usefixtures("answered_here")
@pytest.mark.parametrize("family", ["mistral3-part", "llama-tied"])
@pytest.mark.parametrize("has_shards", [True, False])
def test_an_output_layer_that_the_weights_have_is_counted_whatever_config_json_says(
    tmp_path: pathlib.Path, family: str, has_shards: bool
) -> None:
    """Mistral Small 3 says nothing, which means tied, and has an output layer nevertheless."""
    write_checkpoint(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    for fields in (config, config.get("text_config", {})):
        fields.pop("tie_word_embeddings", None)
    if family == "llama-tied":
        config["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = config.get("text_config", config)
    head = "language_model.lm_head.weight" if "text_config" in config else "lm_head.weight"
    stored = load_file(tmp_path / "model.safetensors")
    stored[head] = torch.randn(text["vocab_size"], text["hidden_size"])
    rest = {name: tensor for name, tensor in stored.items() if name not in (head, "lm_head.weight")}

    def weight_bytes() -> int:
        ended = run("--model", str(tmp_path), "--prompt-tokens", "20", "--output-tokens", "20", "--json")
        assert ended.exit_code == 0, ended.stderr
        return int(json.loads(ended.output)[0]["weight_bytes"])

    save_file(rest, tmp_path / "model.safetensors")
    tied = weight_bytes()
    (tmp_path / "model.safetensors").unlink()
    assert weight_bytes() == tied
    files = {"model-1.safetensors": rest, "model-2.safetensors": {head: stored[head]}}
    places = {name: file for file, tensors in files.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for file, tensors in files.items() if has_shards else ():
        save_file(tensors, tmp_path / file)
    ratio = (weight_bytes() - tied) / (text["vocab_size"] * text["hidden_size"])
    assert ratio in (2, 4)


def test_the_text_part_of_a_model_that_sees_is_planned() -> None:
    (alone, shared) = answers(Question(GEMMA3_4B, [{"load": "dummy"}], 140 << 30, [1, 2]))
    assert not alone.refused and not shared.refused and alone.num_layers == 34
    # 3.88 billion weights, of which a rank has half and all norms.
    assert alone.weight_bytes == pytest.approx(2 * 3.88e9, rel=1e-3)
    assert shared.weight_bytes == pytest.approx(alone.weight_bytes / 2, rel=1e-2)
