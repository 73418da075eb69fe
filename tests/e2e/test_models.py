"""Several models on one server.

They run side by side, are loaded and unloaded while others answer, and are lost without taking
others along.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import threading
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest
from google.protobuf import duration_pb2
from tests.support.ports import free_address
from tests.support.processes import alive, wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, details, generate, greedy, health, read
from tests.support.running_server import DEMO, RunningServer, configuration_of, refused, running_server

from headrace.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, inference_pb2

PROMPT = "Once upon a time"
BUDGET = 300 << 20
OPTIONS = ("--max-model-len", "1024", "--max-num-seqs", "8", "--memory-budget", str(BUDGET))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A repository of four models.

    Two answer differently, a third like the first, one can't be served, and one is a way out.
    """
    folder = tmp_path_factory.mktemp("repository")
    for name in ("demo", "other", "third"):
        shutil.copytree(DEMO, folder / name, ignore=shutil.ignore_patterns("scripts", "draft"))
    # The model's own file goes before the server's settings.
    (folder / "other" / "headrace.toml").write_text('load = "dummy"\nseed = 7\nmemory_budget = "200MiB"\n')
    shutil.copytree(DEMO, folder / "broken", ignore=shutil.ignore_patterns("scripts", "draft", "*.safetensors"))
    shutil.copytree(folder / "third", folder / "misspelt")
    (folder / "misspelt" / "headrace.toml").write_text("blok_size = 16\n")
    outside = tmp_path_factory.mktemp("outside") / "secret"
    shutil.copytree(folder / "demo", outside)
    (folder / "link").symlink_to(outside)
    return folder


class FirstCalls(threading.Thread):
    """Asks a starting server for its health and then for an answer, until all is well.

    It asks for an answer of one model, again and again.
    """

    def __init__(self, address: str, model: str) -> None:
        super().__init__(daemon=True)
        self.health: list[int] = []
        self.codes: list[grpc.StatusCode] = []
        self._address, self._model = address, model
        self.start()

    def run(self) -> None:
        while 1 not in self.health:
            # Without a pause the questions take more of the machine than the start.
            time.sleep(0.05)
            try:
                status = health(self._address)
            except grpc.RpcError:  # nobody listens yet
                continue
            try:
                generate(self._address, spec(self._model, 4))
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()
            self.health.append(status)
            self.codes.append(code)


@pytest.fixture(scope="module")
def address() -> str:
    return free_address()


@pytest.fixture(scope="module")
def first_calls(address: str) -> FirstCalls:
    """Asks from before the server's start on."""
    return FirstCalls(address, "other")


@pytest.fixture(scope="module")
def server(repository: pathlib.Path, address: str, first_calls: FirstCalls) -> Iterator[RunningServer]:
    options = ("--model-repository", str(repository), "--load-models", "other", *OPTIONS)
    with running_server(*options, model=pathlib.Path("demo"), listen=address) as started:
        first_calls.join(CALL_TIMEOUT_S)
        yield started


class Admin:
    """AdminService of a server."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = admin_pb2_grpc.AdminServiceStub(channel)

    def load(self, model: str, memory_bytes: int = 0) -> admin_pb2.LoadModelResponse:
        return self._stub.LoadModel(
            admin_pb2.LoadModelRequest(model=model, memory_bytes=memory_bytes), timeout=CALL_TIMEOUT_S
        )

    def unload(self, model: str, grace_s: int) -> None:
        request = admin_pb2.UnloadModelRequest(model=model, grace=duration_pb2.Duration(seconds=grace_s))
        self._stub.UnloadModel(request, timeout=CALL_TIMEOUT_S)

    def states(self) -> dict[str, admin_pb2.RepositoryModel]:
        listed = self._stub.ListRepository(admin_pb2.ListRepositoryRequest(), timeout=60)
        return {model.name: model for model in listed.models}

    def drain(self, resume: bool = False) -> admin_pb2.DrainResponse:
        return self._stub.Drain(admin_pb2.DrainRequest(resume=resume), timeout=60)

    def memory_plan(self, model: str) -> inference_pb2.MemoryPlan:
        return self._stub.GetMemoryPlan(admin_pb2.GetMemoryPlanRequest(model=model), timeout=60).plan


@pytest.fixture
def admin(server: RunningServer) -> Iterator[Admin]:
    with grpc.insecure_channel(server.address) as channel:
        yield Admin(channel)


def spec(model: str, max_tokens: int = 16) -> generation_pb2.GenerationSpec:
    return greedy(PROMPT, max_tokens, model=model)


def backend_of(server: RunningServer, model: str) -> psutil.Process:
    """The backend process of a model, by the configuration that it was started with."""
    for process in server.descendants("headrace_backend"):
        config = json.loads(configuration_of(process).read_text())
        if config["engine"]["model_name"] == model:
            return process
    raise AssertionError(f"{model} has no backend")


class Reading(threading.Thread):
    """A stream that is read beside the test."""

    def __init__(self, address: str, wanted: generation_pb2.GenerationSpec) -> None:
        super().__init__(daemon=True)
        self.transcript = Transcript()
        self.code = grpc.StatusCode.OK
        self._address, self._wanted = address, wanted
        self.start()
        wait_until(lambda: self.transcript.tokens, what="a first token")

    def run(self) -> None:
        with connected(self._address) as stub:
            stream = stub.Generate(inference_pb2.GenerateRequest(spec=self._wanted), timeout=CALL_TIMEOUT_S)
            try:
                for response in stream:
                    self.transcript.take(response.event)
            except grpc.RpcError as error:
                self.code = error.code()

    def ended(self) -> Transcript:
        self.join(CALL_TIMEOUT_S)
        assert not self.is_alive()
        return self.transcript


@pytest.mark.slow  # tests/supervisor/test_backend_table.py has the same with fakes.
def test_a_server_is_well_when_all_models_of_its_start_are(server: RunningServer, first_calls: FirstCalls) -> None:
    assert not first_calls.is_alive()
    assert first_calls.health[-1] == 1 and first_calls.codes[-1] is grpc.StatusCode.OK
    assert set(first_calls.codes) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK}


def test_both_models_answer_by_name_and_the_default_without_one(server: RunningServer) -> None:
    demo = generate(server.address, spec("demo")).tokens[0]
    other = generate(server.address, spec("other")).tokens[0]
    assert len(demo) == len(other) == 16 and demo != other
    assert generate(server.address, spec("")).tokens[0] == demo
    with connected(server.address) as stub:
        assert [m.name for m in stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60).models] == [
            "demo",
            "other",
        ]
        assert stub.GetModel(inference_pb2.GetModelRequest(), timeout=60).model.name == "demo"
        assert stub.GetLoad(inference_pb2.GetLoadRequest(model="other"), timeout=60).model == "other"


def test_each_backend_keeps_to_its_budget(server: RunningServer, admin: Admin) -> None:
    plans = {name: admin.memory_plan(name) for name in ("demo", "other")}
    assert plans["demo"].total_bytes == BUDGET and plans["other"].total_bytes == 200 << 20
    for plan in plans.values():
        assert plan.weight_bytes + plan.activation_bytes + plan.kv_cache_bytes <= plan.total_bytes
    states = admin.states()
    assert (states["demo"].memory_bytes, states["other"].memory_bytes) == (BUDGET, 200 << 20)


def test_a_request_is_found_at_its_own_model(server: RunningServer) -> None:
    with connected(server.address) as stub:
        made = {}
        for name in ("demo", "other", "demo"):
            submitted = stub.Submit(inference_pb2.SubmitRequest(spec=spec(name, 8)), timeout=60)
            made[submitted.request_id] = name
        transcripts = {
            request_id: read(stub.Subscribe(inference_pb2.SubscribeRequest(request_id=request_id), timeout=60))
            for request_id in made
        }
        for request_id, name in made.items():
            assert transcripts[request_id].tokens[0] == generate(server.address, spec(name, 8)).tokens[0]
            assert not stub.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=60).cancelled
        listed, token = [], ""
        while not listed or token:
            request = inference_pb2.ListRequestsRequest(page_size=2, page_token=token)
            page = stub.ListRequests(request, timeout=60)
            listed, token = [*listed, *page.requests], page.next_page_token
        created = [row.create_time.ToNanoseconds() for row in listed]
        assert created == sorted(created, reverse=True)
        assert len({row.request_id for row in listed}) == len(listed)
        assert {row.request_id: row.model for row in listed if row.request_id in made} == made
        only = stub.ListRequests(inference_pb2.ListRequestsRequest(model="other"), timeout=60).requests
        assert only and {row.model for row in only} == {"other"}


def test_a_model_comes_and_goes_when_its_open_generations_have_ended(server: RunningServer, admin: Admin) -> None:
    golden = generate(server.address, spec("demo")).tokens[0]
    with pytest.raises(grpc.RpcError) as unknown:
        generate(server.address, spec("third"))
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    loaded = admin.load("third")
    assert loaded.model.name == "third" and not loaded.existing
    assert admin.load("third").existing
    assert generate(server.address, spec("third")).tokens[0] == golden
    backend = backend_of(server, "third")
    family = [backend.pid, *(child.pid for child in backend.children(recursive=True))]
    # Open generations end, new ones are not taken.
    reading = Reading(server.address, spec("third", 400))
    unloading = threading.Thread(target=admin.unload, args=("third", 120), daemon=True)
    unloading.start()
    wait_until(lambda: admin.states()["third"].state == admin_pb2.MODEL_STATE_UNLOADING)
    with pytest.raises(grpc.RpcError) as closed:
        generate(server.address, spec("third"))
    assert closed.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)
    assert len(reading.ended().tokens[0]) == 400 and reading.code is grpc.StatusCode.OK
    unloading.join(120)
    assert not unloading.is_alive()
    assert alive(family) == []
    assert admin.states()["third"].state == admin_pb2.MODEL_STATE_UNLOADED
    with pytest.raises(grpc.RpcError) as gone:
        generate(server.address, spec("third"))
    assert gone.value.code() == grpc.StatusCode.NOT_FOUND
    assert generate(server.address, spec("demo")).tokens[0] == golden


# A killed backend of one model is in tests/faults/test_processes_die; of several, with fakes, in
# tests/service/engines/test_models.
@pytest.mark.slow
def test_a_killed_backend_takes_only_its_own_streams(server: RunningServer) -> None:
    golden = generate(server.address, spec("demo", 300)).tokens[0]
    beside = Reading(server.address, spec("demo", 300))
    lost = Reading(server.address, spec("other", 1000))
    before = backend_of(server, "other")
    before.kill()
    lost.ended()
    assert lost.code is grpc.StatusCode.UNAVAILABLE
    # The default model serves, and so does the server.
    assert health(server.address) == 1
    assert beside.ended().tokens[0] == golden and beside.code is grpc.StatusCode.OK

    def answers_again() -> bool:
        try:
            return len(generate(server.address, spec("other", 4)).tokens[0]) == 4
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False

    wait_until(answers_again, 120)
    assert backend_of(server, "other").pid != before.pid


# The same with fake engines is in tests/service/engines/test_models.
@pytest.mark.slow
def test_a_drained_server_finishes_what_runs_and_takes_nothing_new(server: RunningServer, admin: Admin) -> None:
    reading = Reading(server.address, spec("demo", 400))
    assert admin.drain().running_sequences >= 1
    try:
        assert health(server.address) == 2
        for name in ("demo", "other"):
            with pytest.raises(grpc.RpcError) as refused_call:
                generate(server.address, spec(name))
            assert refused_call.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "RetryInfo" in details(refused_call.value.trailing_metadata())
        with connected(server.address) as stub:
            assert stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=60).draining
        assert len(reading.ended().tokens[0]) == 400 and reading.code is grpc.StatusCode.OK
    finally:
        admin.drain(resume=True)
    wait_until(lambda: health(server.address) == 1)
    assert len(generate(server.address, spec("demo")).tokens[0]) == 16


@pytest.mark.parametrize(
    ("model", "memory_bytes", "code", "named"),
    [
        ("broken", 0, grpc.StatusCode.FAILED_PRECONDITION, "model.safetensors"),
        ("misspelt", 0, grpc.StatusCode.FAILED_PRECONDITION, "blok_size; the nearest known one is block_size"),
        ("third", 1 << 50, grpc.StatusCode.RESOURCE_EXHAUSTED, "demo 0.29 GiB"),
        ("nowhere", 0, grpc.StatusCode.NOT_FOUND, "nowhere"),
        ("link", 0, grpc.StatusCode.NOT_FOUND, "link"),
        ("", 0, grpc.StatusCode.INVALID_ARGUMENT, "model"),
        ("../outside", 0, grpc.StatusCode.INVALID_ARGUMENT, "path traversal"),
        ("demo/../third", 0, grpc.StatusCode.INVALID_ARGUMENT, "path traversal"),
        (".hidden", 0, grpc.StatusCode.INVALID_ARGUMENT, "path traversal"),
    ],
)
def test_a_load_that_can_not_be_says_why_and_harms_nobody(
    server: RunningServer, admin: Admin, model: str, memory_bytes: int, code: grpc.StatusCode, named: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        admin.load(model, memory_bytes)
    assert error.value.code() is code, error.value.details()
    assert named in error.value.details() + str(details(error.value.trailing_metadata()))
    # Callers see no path of the machine.
    assert "/" not in error.value.details().replace(model, "") or model in ("../outside", "demo/../third")
    assert len(generate(server.address, spec("demo", 4)).tokens[0]) == 4


# What fails to load and is loaded again is in tests/supervisor/test_backend_table.
@pytest.mark.slow
def test_a_model_that_failed_says_so_and_can_be_loaded_again(server: RunningServer, admin: Admin) -> None:
    with pytest.raises(grpc.RpcError) as error:
        admin.load("third", 32 << 20)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "memory_budget is 33554432" in error.value.details() and "/" not in error.value.details()
    failed = admin.states()["third"]
    assert failed.state == admin_pb2.MODEL_STATE_FAILED and "memory_budget" in failed.reason
    admin.load("third")
    assert admin.states()["third"].state == admin_pb2.MODEL_STATE_READY
    admin.unload("third", grace_s=5)


@pytest.mark.slow  # The test of models that come and go has the rest.
def test_folders_that_come_later_can_be_loaded_and_unloaded_without_a_grace(
    server: RunningServer, admin: Admin, repository: pathlib.Path
) -> None:
    assert "late" not in admin.states() and "link" not in admin.states()
    shutil.copytree(repository / "demo", repository / "late")
    assert admin.load("late").model.name == "late"
    # What is open after the grace ends.
    reading = Reading(server.address, spec("late", 1000))
    admin.unload("late", grace_s=0)
    reading.ended()
    assert reading.code is grpc.StatusCode.UNAVAILABLE
    shutil.rmtree(repository / "late")
    wait_until(lambda: "late" not in admin.states())


def test_a_trace_detail_that_is_not_said_is_refused_by_name(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as error:
        admin_pb2_grpc.AdminServiceStub(channel).SetTraceDetail(admin_pb2.SetTraceDetailRequest(), timeout=60)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "detail" in error.value.details()


# What of a default model that is gone is said without a server in
# tests/service/engines/test_models.
@pytest.mark.slow
def test_the_default_model_may_go_and_the_others_serve_on(server: RunningServer, admin: Admin) -> None:
    admin.unload("demo", grace_s=5)
    try:
        with pytest.raises(grpc.RpcError) as error:
            generate(server.address, spec(""))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "default model" in error.value.details()
        assert len(generate(server.address, spec("other", 4)).tokens[0]) == 4
        wait_until(lambda: health(server.address) == 1)
    finally:
        admin.load("demo")
    assert len(generate(server.address, spec("", 4)).tokens[0]) == 4


def test_a_killed_supervisor_leaves_nothing_of_any_model(server: RunningServer) -> None:
    """The last test of the server, which is gone afterwards."""
    pids = server.all_pids()
    assert len(server.descendants("headrace_backend")) == 2
    server.process.kill()
    server.process.wait()
    wait_until(lambda: alive(pids) == [], 30)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--load-models", "broken"), "model.safetensors"),
        (("--load-models", "nowhere"), "nowhere"),
        (("--load-models", "misspelt"), "blok_size"),
        (("--load-models", "third", "--memory-budget", "1PiB"), "does not fit"),
    ],
)
def test_a_model_named_at_start_that_can_not_be_refuses_the_start(
    repository: pathlib.Path, options: tuple[str, ...], named: str
) -> None:
    ended, _ = refused("--model-repository", str(repository), *options, model=pathlib.Path("demo"))
    assert ended.returncode == 2 and named in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


# A server without a budget takes all that the card has free.
@pytest.mark.gpu
@pytest.mark.whole_card
def test_models_that_share_a_card_need_budgets_that_fit_it(repository: pathlib.Path) -> None:
    small = ("--device", "cuda:0", "--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--graph-sizes", "off")
    name = pathlib.Path("demo")
    with (
        running_server("--model-repository", str(repository), *small, model=name) as started,
        grpc.insecure_channel(started.address) as channel,
        pytest.raises(grpc.RpcError) as unstated,
    ):
        Admin(channel).load("third", 4 << 30)
    assert unstated.value.code() is grpc.StatusCode.FAILED_PRECONDITION and "demo has none" in unstated.value.details()
    options = ("--model-repository", str(repository), *small, "--memory-budget", "4GiB")
    with (
        running_server(*options, model=name) as started,
        grpc.insecure_channel(started.address) as channel,
    ):
        admin = Admin(channel)
        device_bytes = admin.memory_plan("demo").device_bytes
        with pytest.raises(grpc.RpcError) as beyond:
            admin.load("third", device_bytes)
        assert beyond.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "cuda:0 has" in beyond.value.details()
        admin.load("third")
        for model in ("demo", "third"):
            plan = admin.memory_plan(model)
            assert plan.total_bytes == 4 << 30 and plan.measured
        assert generate(started.address, spec("third")).tokens == generate(started.address, spec("demo")).tokens
