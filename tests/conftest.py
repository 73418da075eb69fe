"""What all tests need of their process."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import sys
from collections.abc import Generator, Iterator

import hypothesis
import pytest
from tests.support import everyday_cases, file_order, quick_interpreter, rewritten, toolchains
from tests.support.examples import examples
from tests.support.running_server import RunningServer, running_server
from tests.support.suite_part import SuitePart

_HAS_GPU = pathlib.Path("/dev/nvidiactl").exists()

_CORES = len(os.sched_getaffinity(0))
# Processes that share the suite.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

# Without a card Triton's kernels run in its interpreter. Triton decides when a kernel is defined,
# so this comes before any import of one. And every core has a process of pytest's already: threads
# of one would wait for each other in busy loops.
if not _HAS_GPU:
    for _name, _value in {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}.items():
        os.environ.setdefault(_name, _value)
elif _PROCESSES > 1:
    # Beside a card, references are computed with the cores that there are for each.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _CORES // _PROCESSES)))

# Some of the suite's processes run in folders of their own, where a relative entry names nothing
# and an installed package of another working tree would be imported.
if _path := os.environ.get("PYTHONPATH"):
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in _path.split(os.pathsep))

# The suite starts hundreds of processes. Where compiled modules are not kept, as in many
# containers, each compiles all it imports anew: 4.3 s of CPU for torch alone, 2.1 s with them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example or its data takes says something about the machine only. A test with a list of
# checks of its own names `too_slow` again. Properties that name no number draw hypothesis' usual
# one, or in everyday runs a fifth of it.
hypothesis.settings.register_profile(
    "headrace",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("headrace")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part NUMBER/COUNT` takes one of several parts of the suite's files."""
    parser.addoption("--part", type=SuitePart.parse, help="NUMBER/COUNT: tries one of COUNT parts of the files")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Files of other parts are not looked at."""
    part: SuitePart | None = config.getoption("--part")
    if part is None or not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    return None if part.has(collection_path) else True


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C as in a terminal, and modules that are rewritten by one process each.

    A shell starts background jobs with SIGINT ignored, children inherit that, and tests that press
    Ctrl-C would wait forever.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        rewritten.rewrite_share(config, int(worker[2:]), _PROCESSES)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    """A server of the demo model in fp32, with two services, any of which may be asked.

    There is one for each process of pytest, for all tests that leave it as they found it. In fp32
    greedy answers can be compared token by token.
    """
    with running_server("--services", "2", "--dtype", "fp32", "--device", "cpu", "--num-blocks", "2048") as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported or collected becomes garbage, and looking for it takes a tenth."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Tests and modules stay to the end; no collection of garbage needs to go through them.

    Where kernels are among them, the interpreter is made quick; where grpc.aio is, it is held.
    """
    if (grpc_aio := sys.modules.get("grpc.aio")) is not None:
        # The last object of grpc.aio that is collected stops its poller and may wait for it forever
        # (grpc#22365). One that is held stops it never.
        grpc_aio.init_grpc_aio()
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and not quick_interpreter.REPLACED:
        quick_interpreter.install(interpreter)
    gc.freeze()


# Before pytest leaves out what -m does not ask for.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests for a card are skipped where there is none, and cases that are many there are slow.

    Where several processes share the suite, they take its files in an order of its own.
    """
    if hasattr(config, "workerinput"):
        items[:] = file_order.spread([(item.location[0], item) for item in items])
    if _HAS_GPU:
        # While one waits to have the card alone, its process does nothing else.
        items.sort(key=lambda item: item.get_closest_marker("whole_card") is not None)
    else:
        everyday_cases.mark_others_slow(items)
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests for a card share it, but for those that are marked to have it alone."""
    if not _HAS_GPU or not item.get_closest_marker("gpu"):
        return (yield)
    # Which needs torch, that most tests do without.
    from tests.support import card_turns

    with card_turns.turn(alone=item.get_closest_marker("whole_card") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Names the toolchains whose tests were left out, and how to get them, in the last lines."""
    yield
    lines = toolchains.summary(terminalreporter.stats.get("skipped", []))
    if lines:
        terminalreporter.section("left out")
    for line in lines:
        terminalreporter.line(line)
