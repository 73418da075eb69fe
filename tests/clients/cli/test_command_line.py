"""The `headrace` command: what goes to stdout and stderr, JSON lines, exit codes, the chat loop."""

from __future__ import annotations

import datetime
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from tests.clients.canned_service import REQUEST_ID, CannedServer, answer

from headrace.answers import RequestState, RequestSummary
from headrace.cli import group, listing, main, output
from headrace.events import FinishReason
from headrace.v1 import inference_pb2

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "headrace"]


def run(server: CannedServer, *arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin, env={"HEADRACE_SERVER": server.address})


def start(server: CannedServer, *arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "clients/python"), "HEADRACE_SERVER": server.address}
    return subprocess.Popen([*COMMAND, *arguments], env=environment, text=True, **pipes)


def trace_ids(server: CannedServer) -> list[str]:
    """Ids of the traces that callers asked for, in order."""
    return [seen["traceparent"].split("-")[1] for seen in server.seen.metadata if "traceparent" in seen]


def chats(server: CannedServer) -> list[inference_pb2.ChatRequest]:
    """Returns what the model was asked in a chat, without what only checked the options."""
    return [request for request in server.seen.requests if isinstance(request, inference_pb2.ChatRequest)]


def json_lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generate_prints_the_text_and_nothing_else_on_stdout(server: CannedServer) -> None:
    result = run(server, "generate", "hello", "--max-tokens", "3", "--ledger")
    assert result.exit_code == 0
    assert result.stdout == answer(3) + "\n"
    for figure in ("TTFT", "ITL p50", "ITL p99", "output tokens/s", "decode", "60.0%", "ended: length"):
        assert figure in result.stderr


def test_generate_passes_every_option_on(server: CannedServer) -> None:
    arguments = (
        "--temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --top-n-sigma 1.5 --repetition-penalty 1.5"
        " --presence-penalty 0.5 --frequency-penalty -0.5 --seed 9 --logit-bias 4=-1 --logit-bias 5=2 --stop a --stop b"
        " --stop-token-ids 1,2 --max-tokens 2 --min-tokens 1 --ignore-eos --bad-word x --include-stop-string -n 1"
        " --logprobs 2 --priority -1 --time-limit 2 --cache-salt s --keep-special-tokens --model canned"
        " --token-ids-only --prompt-logprobs 0 --trace-detail span --max-drafts 4 --max-reasoning-tokens 5 --regex a+"
        " --reasoning-effort high"
        " --best-of 3 --beam-search 4,0.5,never"
    )
    assert run(server, "generate", "hello", *arguments.split()).exit_code == 0
    spec = server.seen.requests[0].spec
    # Every field of the proto has an option; token_ids is the other kind of prompt.
    for message, left_out in (
        (spec, {"token_ids"}),
        (spec.beam_search, set()),
        (spec.sampling, set()),
        (spec.stop, set()),
    ):
        assert {field.name for field, _ in message.ListFields()} == set(message.DESCRIPTOR.fields_by_name) - left_out
    assert dict(spec.sampling.logit_bias) == {4: -1, 5: 2} and list(spec.stop.strings) == ["a", "b"]
    assert not spec.skip_special_tokens and spec.stop.ignore_eos


def test_a_traced_call_says_how_to_see_its_trace(server: CannedServer) -> None:
    result = run(server, "generate", "hello", "--trace")
    sent = server.seen.metadata[0]["traceparent"]
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", sent) and result.stdout == answer(5) + "\n"
    trace_id = sent.split("-")[1]
    assert f"trace: {trace_id}" in result.stderr
    assert f"headrace trace {trace_id} --server {server.address}" in result.stderr
    assert run(server, "generate", "hello").stderr == "" and "traceparent" not in server.seen.metadata[1]


BY_JAEGER = "where the server sends traces to Jaeger, see it with: headrace trace {id} --jaeger URL"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (grpc.StatusCode.NOT_FOUND, "headrace trace {id} --server {server}"),
        (grpc.StatusCode.UNAVAILABLE, "headrace trace {id} --server {server}"),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            f"(it does not serve AdminService); {BY_JAEGER}",
        ),
        (
            grpc.StatusCode.PERMISSION_DENIED,
            f"(the key has no permission for AdminService); {BY_JAEGER}",
        ),
        (grpc.StatusCode.FAILED_PRECONDITION, "{server} has telemetry off"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "hello"), ("chat",)])
def test_a_traced_call_names_no_way_to_its_trace_that_the_server_closes(
    server: CannedServer, command: tuple[str, ...], code: grpc.StatusCode, says: str
) -> None:
    server.admin.traces_refused = code
    result = run(server, *command, "--trace", stdin="hello\nonce more\n")
    assert result.exit_code == 0 and answer(3)[:3] in result.stdout
    ids = trace_ids(server)
    for trace_id in ids:
        assert says.format(id=trace_id, server=server.address) in result.stderr
    assert ("--server" in result.stderr) == ("--server" in says) and ("--jaeger" in result.stderr) == (
        "--jaeger" in says
    )
    assert len(server.admin.requests) == 1, "asked once, however many answers there are"


def test_a_call_that_failed_says_its_trace_as_well(server: CannedServer) -> None:
    result = run(server, "generate", "invalid", "--trace")
    assert "trace: " + server.seen.metadata[0]["traceparent"].split("-")[1] in result.stderr


def test_each_answer_of_a_chat_is_a_trace(server: CannedServer) -> None:
    result = run(server, "chat", "--trace", stdin="hello\nhello again\n")
    ids = trace_ids(server)
    assert len(set(ids)) == 2 and all(f"trace: {trace_id}" in result.stderr for trace_id in ids)


def test_options_left_out_are_not_sent(server: CannedServer) -> None:
    assert run(server, "generate", "hello").exit_code == 0
    assert [field.name for field, _ in server.seen.requests[0].spec.ListFields()] == ["text"]


def test_the_prompt_may_come_from_standard_input_or_as_token_ids(server: CannedServer) -> None:
    assert run(server, "generate", "-", stdin="from a pipe").exit_code == 0
    assert run(server, "generate", "--token-ids", "5,6").exit_code == 0
    assert server.seen.requests[0].spec.text == "from a pipe"
    assert list(server.seen.requests[1].spec.token_ids.ids) == [5, 6]


def test_several_outputs_are_not_mixed(server: CannedServer) -> None:
    result = run(server, "generate", "hello", "-n", "2", "--max-tokens", "2")
    assert result.stdout == f"{answer(2)}\n\n--- output 1 ---\n{answer(2, 1)}\n"


def test_token_ids_are_printed_where_there_is_no_text(server: CannedServer) -> None:
    assert run(server, "generate", "hello", "--max-tokens", "3", "--token-ids-only").stdout == "100 101 102 \n"


def test_json_shows_the_prompts_log_probabilities(server: CannedServer) -> None:
    events = json_lines(run(server, "generate", "hello", "--prompt-logprobs", "0", "--json"))
    parts = [event for event in events if event["event"] == "prompt_logprobs"]
    assert [part["first_token_index"] for part in parts] == [1, 3, 5]
    assert parts[0]["logprobs"]["sampled"] == [-1.0, -1.5]


def test_admin_loads_lists_drains_and_unloads(server: CannedServer) -> None:
    loaded = run(server, "admin", "load", "other", "--memory", "1.5GiB")
    assert (loaded.exit_code, loaded.stdout) == (0, "other serves\n")
    assert server.admin.requests[-1].memory_bytes == 3 << 29
    assert run(server, "admin", "load", "other").stdout == "other served already\n"
    shown = " ".join(run(server, "admin", "models").stdout.split())
    assert "broken failed - no config.json" in shown and "other ready 3.00 GiB" in shown
    rows = json_lines(run(server, "admin", "models", "--json"))
    assert [(row["name"], row["state"]) for row in rows][:2] == [("broken", "failed"), ("canned", "ready")]
    assert run(server, "admin", "unload", "other", "--grace", "2.5").stdout == "other unloaded\n"
    assert server.admin.requests[-1].grace.ToMilliseconds() == 2500
    assert run(server, "admin", "drain").stdout == "3 sequences run, 1 requests wait\n" and server.admin.draining
    assert json_lines(run(server, "admin", "resume", "--json"))[0]["waiting_requests"] == 1
    assert not server.admin.draining
    assert "KV cache 4.00, weights 1.00 of 8.00 GiB, measured" in run(server, "admin", "memory").stdout
    assert "no plan yet" in run(server, "admin", "memory", "--model", "other").stderr
    assert json_lines(run(server, "admin", "memory", "--model", "other", "--json")) == [None]


def test_admin_refuses_in_one_message(server: CannedServer) -> None:
    missing = run(server, "admin", "load", "nowhere")
    assert missing.exit_code == 1 and "NOT_FOUND: no model nowhere" in missing.stderr
    large = run(server, "admin", "load", "other", "--memory", "16GiB")
    assert large.exit_code == 1 and "8 GiB left" in large.stderr
    assert run(server, "admin", "load", "other", "--memory", "much").exit_code == 2


def test_json_prints_each_event_as_a_line(server: CannedServer) -> None:
    events = json_lines(run(server, "generate", "hello", "--max-tokens", "1", "--json"))
    assert [event["event"] for event in events] == ["accepted", "started", "delta", "output_finished", "done"]
    assert events[2] == {
        "event": "delta",
        "output_index": 0,
        "first_token_index": 0,
        "token_ids": [100],
        "text": "w0 ",
        "logprobs": None,
        "content": [],
    }
    assert events[3]["reason"] == "length" and events[4]["ledger"]["end_to_end_ns"] == 10_000_000


def test_submit_subscribe_and_cancel(server: CannedServer) -> None:
    submitted = run(server, "submit", "hello", "--idempotency-key", "k")
    assert submitted.stdout == f"{REQUEST_ID}\n"
    server.service.breaks = [6]
    subscribed = run(server, "subscribe", REQUEST_ID, "--from-token", "2")
    assert subscribed.exit_code == 0
    assert answer(2) + subscribed.stdout == answer(12) + "\n"
    assert "connection lost" in subscribed.stderr
    assert run(server, "cancel", REQUEST_ID).stdout == f"{REQUEST_ID} cancelled\n"
    assert json_lines(run(server, "cancel", REQUEST_ID, "--json")) == [{"request_id": REQUEST_ID, "cancelled": True}]


def test_requests_models_and_load_as_tables_and_json(server: CannedServer) -> None:
    assert "req-0" in run(server, "requests").stdout
    assert [row["request_id"] for row in json_lines(run(server, "requests", "--json", "--limit", "3"))] == [
        f"req-{i}" for i in range(3)
    ]
    assert (
        json_lines(run(server, "requests", "--json", "--state", "finished"))[0]["create_time"]
        == "2023-11-14T22:13:20+00:00"
    )
    assert server.seen.requests[-1].state == 3
    shown = " ".join(run(server, "models").stdout.split())
    assert "canned" in shown and "KV cache 4.00, weights 1.00 of 8.00 GiB, measured" in shown
    assert "not followed suppress_tokens (a list of 2 entries) has no effect" in shown
    assert json_lines(run(server, "models", "--json"))[0]["parameter_count"] == 7_500_000
    shown = " ".join(run(server, "load").stdout.split())
    for part in (
        "50.0% of 64 blocks",
        "4 of at most 8",
        "drained: no new",
        "25.0% of prompt tokens",
        "5 of at most 64",
    ):
        assert part in shown
    run(server, "requests", "--model", "canned")
    assert server.seen.requests[-1].model == "canned"
    assert json_lines(run(server, "load", "--json"))[0]["running_sequences"] == 4


def test_ids_in_the_table_are_whole_whatever_else_is_in_it() -> None:
    begun = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=50)
    ids = [f"01m8150x66bf8q8mbjxbw9pht{i}-n5th" for i in range(3)]
    reasons = [(FinishReason.LENGTH, FinishReason.CANCELLED), (FinishReason.STOP,), ()]
    rows = [
        RequestSummary(request_id, RequestState.FINISHED, begun, 2000, 500, of_row, True, "demo")
        for request_id, of_row in zip(ids, reasons, strict=True)
    ]
    shown = io.StringIO()
    Console(file=shown, width=80).print(listing._request_table(rows))
    lines = shown.getvalue().splitlines()
    assert [word for line in lines for word in line.split() if word in ids] == ids
    assert all(word in shown.getvalue() for word in ("length", "cancelled", "stop", "50 min", "submit"))
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("prompt", ["invalid", "overloaded", "broken", "failing", "no-done"])
def test_a_server_error_is_one_message_and_exit_code_1(server: CannedServer, prompt: str) -> None:
    for flags in ((), ("--json",)):
        result = run(server, "generate", prompt, *flags)
        assert result.exit_code == 1
        assert "Traceback" not in result.output


def test_errors_name_field_and_hint(server: CannedServer) -> None:
    assert (
        run(server, "generate", "invalid").stderr
        == "error: INVALID_ARGUMENT: --top-p must be above 0 and at most 1 (given: 7)\n"
    )
    assert "try again in 1.5 s" in run(server, "generate", "overloaded").stderr
    assert "(request req-from-details)" in run(server, "generate", "broken").stderr
    error = json.loads(run(server, "generate", "invalid", "--json").stderr)["error"]
    assert error["code"] == "INVALID_ARGUMENT" and error["violations"][0]["field"] == "spec.sampling.top_p"


def test_no_server_says_so_quickly() -> None:
    begun = time.monotonic()
    result = CliRunner().invoke(main, ["models", "--server", "127.0.0.1:9"])
    assert (result.exit_code, time.monotonic() - begun < 60.0) == (1, True)
    assert result.stderr == (
        "error: UNAVAILABLE: no server listens on 127.0.0.1:9; start one with headrace serve, or name another with"
        " --server\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hello", "--max-tokens", "many"],
        ["generate", "hello", "--token-ids", "1"],
        ["generate", "--token-ids", "1,x"],
        ["generate", "hello", "--logit-bias", "5"],
        ["generate", "hello", "--no-such-option"],
        ["chat", "-n", "2"],
        ["chat", "--token-ids-only"],
        ["requests", "--state", "asleep"],
        ["cancel"],
        ["no-such-command"],
    ],
)
def test_a_command_line_that_makes_no_sense_is_exit_code_2(server: CannedServer, arguments: list[str]) -> None:
    result = run(server, *arguments)
    assert result.exit_code == 2
    assert not server.seen.requests


def test_text_is_streamed_as_it_arrives(server: CannedServer) -> None:
    with start(server, "generate", "slow", "--max-tokens", "60", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 6).decode()
        arrived = time.monotonic()
        rest = process.stdout.read()
        # The server sleeps for 3 s between the tokens.
        assert time.monotonic() - arrived > 1.0
    assert first + rest == answer(60) + "\n"
    assert process.returncode == 0


def test_ctrl_c_ends_generate_with_130_and_cancels_on_the_server(server: CannedServer) -> None:
    with start(server, "generate", "endless", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130
    assert "interrupted" in errors and "Traceback" not in errors
    assert server.seen.cancelled.wait(120)


def test_exit_codes_of_the_real_process(server: CannedServer) -> None:
    for arguments, code in ((["generate", "hello"], 0), (["generate", "invalid"], 1), (["generate", "--nope"], 2)):
        with start(server, *arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            pass
        assert process.returncode == code


def test_chat_from_a_pipe_keeps_the_conversation(server: CannedServer) -> None:
    lines = (
        "/system be brief\nhi\n/set temperature 0.5\n/set max-tokens 2\nagain\n/ledger\n/reset\n/set"
        " temperature\nnew\n/quit\nnever sent\n"
    )
    result = run(server, "chat", stdin=lines)
    assert result.exit_code == 0
    assert result.stdout == f"{answer(5)}\n{answer(2)}\n{answer(2)}\n"
    assert "where the time went" in result.stderr
    first, second, third = chats(server)
    assert [part.parts[0].text for part in first.messages] == ["be brief", "hi"]
    assert [part.parts[0].text for part in second.messages] == ["be brief", "hi", answer(5), "again"]
    assert [part.parts[0].text for part in third.messages] == ["be brief", "new"]
    assert second.spec.sampling.temperature == 0.5 and not third.spec.sampling.HasField("temperature")
    assert third.spec.stop.max_tokens == 2


def test_chat_explains_wrong_commands_and_goes_on(server: CannedServer) -> None:
    lines = (
        "/nope\n/set warmth 3\n/set temperature hot\n/set temperature 900\n/set model other\n/set n 2\n/set seed=7\n"
        "/ledger\n/help\n/set\nhi\n"
    )
    result = run(server, "chat", stdin=lines)
    assert result.exit_code == 0 and result.stdout == answer(5) + "\n"
    (asked,) = chats(server)
    assert asked.spec.sampling.seed == 7 and not asked.spec.sampling.HasField("temperature") and not asked.spec.model
    assert max(map(len, result.stderr.splitlines())) <= 100
    for message in (
        "no command /nope",
        "no option warmth",
        "not set: temperature: 'hot' is not a valid float",
        "not set: temperature must be at most 100\n",
        "not set: no model other\n",
        "[seed = 7]",
        "seed = 7 ",
        "no option n",
        "no whole answer yet",
    ):
        assert message in result.stderr
    assert run(server, "chat", stdin="invalid\n").exit_code == 1


def test_chat_refuses_options_before_anything_is_asked(server: CannedServer) -> None:
    result = run(server, "chat", "--temperature", "900", stdin="hello\n")
    assert (result.exit_code, result.stderr) == (1, "error: INVALID_ARGUMENT: --temperature must be at most 100\n")
    assert not chats(server)


def test_chat_takes_messages_of_several_lines_from_a_pipe(server: CannedServer) -> None:
    lines = '"""/etc/hosts\n\n  is a file\n"""\n"""one"""\n'
    assert run(server, "chat", stdin=lines).exit_code == 0
    assert [chat.messages[-1].parts[0].text for chat in chats(server)] == ["/etc/hosts\n\n  is a file", "one"]
    unended = run(server, "chat", stdin='"""one\n')
    assert unended.exit_code == 2 and 'has no """ at its end' in unended.stderr
    undecodable = run(server, "chat", stdin=b"caf\xff\n")
    assert undecodable.exit_code == 2 and "no UTF-8 text" in undecodable.stderr


def test_server_commands_say_how_to_install_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_installed", dict)
    for name in ("serve", "service", "backend", "bench", "doctor", "keys", "certs"):
        result = CliRunner().invoke(main, [name, "--model", "models/demo", "--help"])
        assert result.exit_code == 2
        assert f"headrace {name} is part of the server" in result.stderr and "pip install" in result.stderr
    assert "\n  serve" not in CliRunner().invoke(main, ["--help"]).stdout


def test_installed_commands_appear_and_broken_ones_cost_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = group.EntryPoint
    points = {
        "serve": entry("serve", "headrace.cli.listing:models", group.ENTRY_POINT_GROUP),
        "doctor": entry("doctor", "headrace_nowhere:doctor", group.ENTRY_POINT_GROUP),
        "bench": entry("bench", "headrace.cli.output:warn", group.ENTRY_POINT_GROUP),
    }
    monkeypatch.setattr(group, "_installed", lambda: points)
    overview = CliRunner().invoke(main, ["--help"])
    assert overview.exit_code == 0 and "\n  serve" in overview.stdout and "generate" in overview.stdout
    assert "List the models" in CliRunner().invoke(main, ["serve", "--help"]).stdout
    broken = CliRunner().invoke(main, ["doctor", "--anything"])
    assert (broken.exit_code, "cannot be loaded: ModuleNotFoundError" in broken.stderr) == (2, True)
    assert "is no click command" in CliRunner().invoke(main, ["bench"]).stderr


def test_control_characters_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output.echo_text("a\x1b[2Jb\n\tc")
    assert capsys.readouterr().out == "a\x1b[2Jb\n\tc"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.echo_text("a\x1b[2Jb\n\tc")
    assert capsys.readouterr().out == "a\ufffd[2Jb\n\tc"
