"""Which ranks a host has, where they meet, and how far those of others are."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_backend.config import MAX_HOSTS, MAX_TP, EngineConfig
from headrace_backend.server.hosts.routes import address_towards, interface_of, peer_address
from headrace_backend.server.workers.worker_process import RankDescriptors
from headrace_backend.step.meeting import MeetingPoint
from headrace_backend.step.rank_board import RankBoard, create_board
from headrace_backend.worker.start_up.device import too_few_cards


def engine(**settings: Any) -> EngineConfig:
    return EngineConfig(model=pathlib.Path("m"), device="cpu", **settings)


@given(pp=st.integers(1, 8), tp=st.integers(1, 8), hosts=st.integers(1, MAX_HOSTS))
def test_each_host_has_whole_stages_or_an_equal_part_of_one_or_is_refused(pp: int, tp: int, hosts: int) -> None:
    whole, part = pp % hosts == 0, hosts % pp == 0 and tp % (hosts // pp) == 0
    fits = pp * tp <= MAX_TP * hosts
    if not (fits and (whole or part)):
        with pytest.raises(pydantic.ValidationError, match="which are"):
            engine(pp=pp, tp=tp, hosts=hosts)
        return
    config = engine(pp=pp, tp=tp, hosts=hosts)
    each = config.ranks_per_host
    assert each * hosts == config.num_ranks and each <= MAX_TP
    # The stages of a host's ranks: each of its stages is whole, or it has one.
    for first in range(0, config.num_ranks, each):
        stages = [rank // tp for rank in range(first, first + each)]
        assert len(set(stages)) == 1 or all(stages.count(stage) == tp for stage in stages)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"pp": 4, "tp": 8, "hosts": 2},
            "which are 32 ranks; 2 machines have at most 16: pp of at most 2 works with tp 8",
        ),
        ({"pp": 2, "tp": 2, "hosts": 3}, "hosts is 3: each machine has as many whole stages, .* hosts 1, 2, 4 work"),
        ({"pp": 2, "hosts": 2, "speculate": "mtp"}, "speculate is mtp and pp is 2: .* pp 1 works, or speculate off"),
    ],
)
def test_what_can_not_be_dealt_out_is_refused_with_what_can(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=said):
        engine(**settings)


def test_each_host_needs_cards_for_its_own_ranks_alone() -> None:
    config = engine(pp=4, tp=2, hosts=2)
    assert too_few_cards(0, config, None, 4) is None  # type: ignore[arg-type]  # not reached
    said = too_few_cards(1, config, None, 4)  # type: ignore[arg-type]  # not reached
    assert said is not None and "one GPU for each of 4 ranks of this host from cuda:1 on, and torch sees 4" in said


@given(st.ip_addresses(), st.integers(0, 65535), st.from_regex(r"[a-z0-9.@-]{1,15}", fullmatch=True))
def test_a_meeting_point_crosses_a_command_line(address: Any, port: int, interface: str) -> None:
    meeting = MeetingPoint(str(address), port, interface)
    assert MeetingPoint.parse(str(meeting)) == meeting


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.2:41234", "10.0.0.2"), ("ipv6:%5Bfe80::1%5D:5", "fe80::1"), ("ipv6:[::1]:5", "::1")],
)
def test_the_address_of_a_peer_is_read(peer: str, address: str) -> None:
    assert peer_address(peer) == address


def test_the_way_to_this_machine_is_its_loopback_interface() -> None:
    assert interface_of(address_towards("127.0.0.1")) == "lo" == interface_of("127.8.8.8")
    with pytest.raises(OSError, match="no network interface has the address"):
        interface_of("198.51.100.1")


def test_a_board_takes_the_marks_of_ranks_that_are_elsewhere() -> None:
    ours, theirs = (RankBoard(descriptor, 3) for descriptor in (create_board(3), create_board(3)))
    line = theirs.line(2)
    line.begin_step(7)
    line.make_progress()
    ours.put(2, theirs.counters(2))
    assert ours.marks()[2].step_id == 7 and ours.progress() == theirs.progress()
    with pytest.raises(ValueError, match="2 counters of rank 1; a line has 3"):
        ours.put(1, [1, 2])


def test_only_rank_0_inherits_the_socket_at_which_ranks_meet() -> None:
    meeting = MeetingPoint("127.0.0.1", 5, "lo")
    ranks = RankDescriptors.create(4, meeting)._replace(store=os.open("/dev/null", os.O_RDONLY))
    try:
        assert len(ranks.of_rank(0)) == 2 and ranks.of_rank(1) == (ranks.board,)
        named = ("--board", str(ranks.board), "--store", str(ranks.store), "--meeting", "127.0.0.1,5,lo")
        assert ranks.arguments(0) == named
        assert ranks.arguments(1) == ("--board", str(ranks.board), "--meeting", "127.0.0.1,5,lo")
    finally:
        ranks.close()
