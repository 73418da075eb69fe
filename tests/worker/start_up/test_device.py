"""Which device is taken, and the one line that says why not another."""

from __future__ import annotations

import pytest
import torch

from headrace_backend.cards import Card
from headrace_backend.worker.errors import StartRefused
from headrace_backend.worker.start_up import device as devices
from headrace_backend.worker.start_up.device import NoCuda, choose_device, explain
from headrace_backend.worker.start_up.memory_plan import free_memory_bytes


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (NoCuda(None, "550.1", ""), "the installed torch is built for CPUs only"),
        (NoCuda("13.0", "", "no driver"), "this machine has no NVIDIA driver"),
        (
            NoCuda(
                "13.0", "470.82", "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
            ),
            "the NVIDIA driver 470.82 is too old for the installed torch, which is built for CUDA 13.0",
        ),
        (
            NoCuda("13.0", "580.1", "No CUDA GPUs are available."),
            "the NVIDIA driver 580.1 shows no GPU to torch (No CUDA GPUs are available)",
        ),
        (NoCuda("13.0", "580.1", ""), "the NVIDIA driver 580.1 shows no GPU to torch"),
    ],
)
def test_why_there_is_no_gpu_is_one_line(facts: NoCuda, line: str) -> None:
    assert explain(facts) == line


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one card and a driver; what they are is the test's to say."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "_driver_version", lambda: "580.1")
    return monkeypatch


def test_an_old_card_is_refused_by_name_and_passed_over_by_auto(card: pytest.MonkeyPatch) -> None:
    card.setattr(devices, "_card", lambda device: Card("Tesla T4", (7, 5)))
    with pytest.raises(
        StartRefused, match="device is 'cuda': Tesla T4 has compute capability 7.5, .*; device cpu works"
    ):
        choose_device("cuda")
    assert choose_device("auto") == (
        torch.device("cpu"),
        "Tesla T4 has compute capability 7.5, the kernels need 8.0 or more; the model runs on the CPU",
    )


def test_a_good_card_is_taken(card: pytest.MonkeyPatch) -> None:
    card.setattr(devices, "_card", lambda device: Card("NVIDIA H200", (9, 0)))
    for name in ("auto", "cuda", "cuda:0"):
        assert choose_device(name) == (torch.device("cuda", 0), None)
    assert choose_device("cpu") == (torch.device("cpu"), None)
    with pytest.raises(StartRefused, match="device is 'cuda:1'; torch sees only cuda:0"):
        choose_device("cuda:1")


@pytest.mark.parametrize(("driver", "reported"), [("", False), ("470.82", True)])
def test_without_a_usable_driver_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch, driver: str, reported: bool) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "_driver_version", lambda: driver)
    device, notice = choose_device("auto")
    assert device == torch.device("cpu")
    assert (notice is not None) == reported and (notice is None or "too old" in notice and "runs on the CPU" in notice)
    with pytest.raises(StartRefused, match="device is 'cuda:0': .*; device cpu works"):
        choose_device("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_auto_is_the_gpu_and_its_free_memory_is_what_cuda_says() -> None:
    device, _ = choose_device("auto")
    assert device == torch.device("cuda", 0)
    assert 1 << 30 < free_memory_bytes(device) <= torch.cuda.get_device_properties(device).total_memory
