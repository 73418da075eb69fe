"""Each drafter with each option, against the same server without drafts: answers are equal.

What may be asked is `test_speculation.SPECS`, and tools; servers are whole ones: alone with few
blocks, on two and four ranks, and with each kind of quantized weights and cache. Rows find
prefixes, are pressed out, lose their worker or their engine, are left by their readers, and are
read on from the middle. Stages are refused (tests/supervisor/test_config.py). Every day a lookup
meets the same in test_speculation.py, and each drafter each option without a server in
tests/worker/speculation.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from tests.e2e.test_speculation import CRAMPED, FP32, SPECS, all_at_once, assert_same, logprobs, seen, spec
from tests.support.eagle_heads import write_random_head
from tests.support.mtp_models import make_agreeing, write_mtp_model
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, idle_load, read
from tests.support.running_server import DEMO, RunningServer, configuration_of, running_server

from headrace.v1 import inference_pb2
from headrace_service.engines.request_ids import number_in, tag_of

pytestmark = pytest.mark.slow

DRAFTERS = ("ngram", "suffix", "draft", "eagle", "mtp")
# Options of servers with few bits.
BITS = {
    "int8": ("--quantize", "int8", "--kv-dtype", "int8"),
    "int4": ("--quantize", "int4", "--quantize-group", "32", "--kv-dtype", "fp8"),
    "fp8": ("--quantize", "fp8", "--kv-dtype", "fp8"),
    "nf4": ("--quantize", "nf4"),
}
PLACES = {"alone": CRAMPED, "tp2": (*CRAMPED, "--tp", "2"), "tp4": (*CRAMPED, "--tp", "4")}
PLACES |= {name: (*CRAMPED, *bits) for name, bits in BITS.items()}
# A draft model that ranks share, as they do large ones on cards.
PLACES["shared"] = (*PLACES["tp2"], "--draft-sharing", "shared")
# A server takes most of a minute: every drafter is in three places, and the two that compute a
# model's layers are in all.
EVERYWHERE = ("draft", "mtp")
CELLS = [
    (drafter, place)
    for place in PLACES
    for drafter in DRAFTERS
    if (drafter in EVERYWHERE or place in ("alone", "tp2", "int8")) and (drafter == "draft" or place != "shared")
]
# With a cache of 8 bits other batches round other numbers, and a form makes few tokens likely.
QUANTIZED = ("greedy", "temperature", "top_k", "penalties", "bad_words", "logprobs", "schema", "several")
QUESTION = "What is the weather in Paris?"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}


# A question that is answered by calls of tools, one of which keeps its schema.
CHAT = inference_pb2.ChatRequest(
    spec=spec("", {"temperature": 1.0, "seed": 3}, n=2),
    messages=[inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text=QUESTION)])],
    tools=[
        inference_pb2.Tool(name="weather", parameters_json_schema=json.dumps(CITY), strict=True),
        inference_pb2.Tool(name="clock"),
    ],
    tool_choice=inference_pb2.ToolChoice(mode=inference_pb2.TOOL_CHOICE_MODE_REQUIRED),
)
CHAT.spec.ClearField("prompt")
CHAT.spec.stop.ignore_eos = False
TOOLS = "tools"


def ask(address: str, name: str) -> Transcript:
    """Asks for one of `SPECS`, or for calls of tools."""
    if name != TOOLS:
        return generate(address, SPECS[name])
    with connected(address) as calls:
        return read(calls.Chat(CHAT, timeout=CALL_TIMEOUT_S))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_random_head(tmp_path_factory.mktemp("heads") / "head", DEMO)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A mixture of experts with the demo's tokenizer, whose layer behind the last one is right."""
    eos = json.loads((DEMO / "config.json").read_text())["eos_token_id"]
    sizes = {"vocab_size": 4096, "hidden_size": 64, "max_position_embeddings": 2048, "num_key_value_heads": 4}
    # What ranks and groups of quantized weights divide.
    sizes |= {"intermediate_size": 128, "moe_intermediate_size": 64}
    path = write_mtp_model(tmp_path_factory.mktemp("models") / "glm", eos_token_id=eos, **sizes)
    make_agreeing(path)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


Golden = dict[str, Transcript]


@pytest.fixture(scope="module")
def golden(shared_server: RunningServer, glm: pathlib.Path) -> Callable[[str, str], Golden]:
    """What a server without drafts answers, by drafter and place; kept."""
    kept: dict[tuple[bool, str], Golden] = {}

    def answers(server: RunningServer) -> Golden:
        return {name: ask(server.address, name) for name in (*SPECS, TOOLS)}

    def of(drafter: str, place: str) -> Golden:
        key = drafter == "mtp", place if place in BITS else ""
        if key not in kept and key == (False, ""):
            kept[key] = answers(shared_server)
        elif key not in kept:
            model = ("--model", str(glm)) if key[0] else ()
            with running_server(*FP32, *model, *BITS.get(place, ())) as server:
                kept[key] = answers(server)
        return kept[key]

    return of


def flags_of(drafter: str, head: pathlib.Path, glm: pathlib.Path) -> tuple[str, ...]:
    """Options of a server that drafts."""
    others = {
        "draft": ("--draft-model", str(DEMO / "draft")),
        "eagle": ("--draft-model", str(head)),
        "mtp": ("--model", str(glm)),
    }
    num_drafts = "2" if drafter in ("eagle", "mtp") else "4"
    return ("--speculate", drafter, "--speculate-tokens", num_drafts, *others.get(drafter, ()))


class Drafting(NamedTuple):
    """A server that drafts, and what one of the same model that does not draft answers."""

    server: RunningServer
    golden: Golden
    drafter: str
    place: str


@pytest.fixture(scope="module", params=CELLS, ids=["-".join(cell) for cell in CELLS])
def drafting(
    request: pytest.FixtureRequest, head: pathlib.Path, glm: pathlib.Path, golden: Callable[[str, str], Golden]
) -> Iterator[Drafting]:
    drafter, place = request.param
    expected = golden(drafter, place)
    with running_server(*FP32, *flags_of(drafter, head, glm), *PLACES[place]) as server:
        yield Drafting(server, expected, drafter, place)
        wait_until(lambda: idle_load(server.address), 60, "no request and no block left")


def names_of(drafting: Drafting) -> list[str]:
    return list(QUANTIZED if drafting.place in BITS else (*SPECS, TOOLS))


def check(drafting: Drafting, name: str, found: Transcript) -> None:
    if drafting.place not in BITS:
        return assert_same(found, drafting.golden[name], name)
    assert seen(found) == seen(drafting.golden[name]), name
    # A key that another batch rounds to the next of 256 steps moves logits by so much.
    np.testing.assert_allclose(logprobs(found), logprobs(drafting.golden[name]), atol=0.05, err_msg=name)


def test_each_option_answers_as_without_drafts(drafting: Drafting) -> None:
    """Twice: the second time prompts are found in the prefix cache."""
    num_drafts = 0
    for _ in range(2 if drafting.place == "alone" else 1):
        for name in names_of(drafting):
            found = ask(drafting.server.address, name)
            check(drafting, name, found)
            num_drafts += found.done.ledger.draft_tokens if found.done else 0
    assert num_drafts > 0


def test_rows_together_answer_as_without_drafts_and_press_each_other_out(drafting: Drafting) -> None:
    names = [
        name for name in names_of(drafting) if name not in ("prompt_logprobs", "several", "best_of", "beams", TOOLS)
    ]
    for number in range(10):
        # On a busy machine requests come one after the other, and answers of many drafts end before
        # the next one is there: more of them keep all rows taken.
        asked = names * min(1 + number, 4)
        answers = all_at_once(drafting.server, [SPECS[name] for name in asked])
        for name, answer in zip(asked, answers, strict=True):
            check(drafting, name, answer)
        # Those of two ranks and of few bits are those of one rank, whose rows were pressed out.
        if drafting.place != "alone" or any(answer.done and answer.done.ledger.preemptions for answer in answers):
            return
    raise AssertionError("nobody was preempted")


def test_a_reader_that_leaves_and_comes_back_finds_what_follows(drafting: Drafting) -> None:
    """Who leaves for good keeps no block and changes nobody's answer."""
    address, name = drafting.server.address, "temperature"
    with connected(address) as calls:
        left = calls.Generate(inference_pb2.GenerateRequest(spec=SPECS["several"]))
        next(iter(left))
        left.cancel()
        submit = inference_pb2.SubmitRequest(spec=SPECS[name])
        wanted = inference_pb2.SubscribeRequest(request_id=calls.Submit(submit, timeout=CALL_TIMEOUT_S).request_id)
        stream = calls.Subscribe(wanted, timeout=CALL_TIMEOUT_S)
        begun = Transcript()
        for response in stream:
            begun.take(response.event)
            if begun.tokens.get(0):
                break
        stream.cancel()
        wanted.from_token = len(begun.tokens[0])
        rest = read(calls.Subscribe(wanted, timeout=CALL_TIMEOUT_S))
    assert begun.tokens[0] + rest.tokens.get(0, []) == drafting.golden[name].tokens[0]


def test_a_worker_that_is_killed_within_answers_loses_and_doubles_nothing(drafting: Drafting) -> None:
    server, names = drafting.server, ("biased", "temperature", "penalties", "bad_words", "schema")
    names = tuple(name for name in names if name in names_of(drafting))
    worker = server.worker()
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        answers = [pool.submit(generate, server.address, SPECS[name]) for name in names]
        wait_until(lambda: not idle_load(server.address), 60, "requests are under way")
        worker.kill()
        for name, answer in zip(names, answers, strict=True):
            check(drafting, name, answer.result())
    assert server.worker().pid != worker.pid


BLOCKS = 256


class Following:
    """An answer, as far as it has come."""

    def __init__(self, server: RunningServer, name: str) -> None:
        self.server, self.name, self.found = server, name, Transcript()

    def read(self) -> None:
        """Reads to the end."""
        with connected(self.server.address) as calls:
            request = inference_pb2.GenerateRequest(spec=SPECS[self.name])
            for response in calls.Generate(request, timeout=CALL_TIMEOUT_S):
                self.found.take(response.event)

    @property
    def has_begun(self) -> bool:
        """Whether there is a token."""
        return bool(self.found.tokens)

    @property
    def engine(self) -> int:
        """The number of the engine that was asked first, which the request's id tells."""
        accepted = self.found.events[0].accepted
        number = number_in(tag_of(accepted.request_id), accepted.model_revision.partition("@")[0])
        assert number is not None
        return number


def both_serve(server: RunningServer) -> bool:
    """Whether two engines have blocks: one that was started again has, once its worker is ready."""
    with connected(server.address) as calls:
        load = calls.GetLoad(inference_pb2.GetLoadRequest(), timeout=CALL_TIMEOUT_S)
    return bool(load.kv_blocks == 2 * BLOCKS)


def lose_the_busiest_engine(server: RunningServer, names: Sequence[str]) -> list[Following]:
    """Asks for answers and, once half have begun, kills the engine that computes the most.

    Returns all answers, which have ended.
    """
    wait_until(lambda: both_serve(server), 120, "both engines serve")
    answers = [Following(server, name) for name in names]
    with concurrent.futures.ThreadPoolExecutor(len(answers)) as pool:
        reads = [pool.submit(answer.read) for answer in answers]

        def begun() -> list[Following]:
            return [answer for answer in answers if answer.has_begun]

        # Reads that have failed show that below.
        wait_until(lambda: 2 * len(begun()) >= len(answers) or all(read.done() for read in reads), CALL_TIMEOUT_S)
        open_at = collections.Counter(answer.engine for answer in begun() if not answer.found.done)
        for number, _ in open_at.most_common(1):
            (lost,) = (
                process
                for process in server.descendants("headrace_backend")
                if configuration_of(process).name == f"backend-{number}.json"
            )
            lost.kill()
        for read in reads:
            read.result()
    return answers


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_engine_that_is_lost_within_answers_loses_and_doubles_nothing(
    drafter: str, head: pathlib.Path, glm: pathlib.Path, golden: Callable[[str, str], Golden]
) -> None:
    """The other of two engines goes on, from the token behind the last one that readers have."""
    names = ("biased", "temperature", "penalties", "bad_words", "biased_temperature", "biased_penalties", "schema")
    expected = golden(drafter, "alone")
    options = (*FP32, *flags_of(drafter, head, glm), "--num-blocks", str(BLOCKS), "--replicas", "2")
    with running_server(*options) as server:
        # A busy machine may let all answers end before the kill.
        for _ in range(5):
            answers = lose_the_busiest_engine(server, names * 2)
            for answer in answers:
                assert_same(answer.found, expected[answer.name], answer.name)
            if any(event.HasField("resumed") for answer in answers for event in answer.found.events):
                return
    raise AssertionError("the lost engine had nothing to do")
