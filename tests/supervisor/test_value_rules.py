"""Whatever value a setting refuses, the rule is said in a command line's words."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headrace_quantize.config import QuantizeConfig
from headrace_supervisor import config as configs
from headrace_supervisor.settings import ConfigError, Group, check_table

# Each class of settings once.
GROUPS = tuple({group.model: group for group in (*configs.SERVE, Group("quantize", QuantizeConfig))}.values())
BAD: tuple[Any, ...] = ("many", -(10**30), float("nan"), [{}], {"a": 1}, "9" * 5000)
# Of pydantic's sentences.
FOREIGN = re.compile(r"[Ii]nput|[Vv]alid |parse|[Vv]alue error|should be (?:a|greater|less)|byte unit|constraint")


def refusals(group: Group, name: str) -> list[str]:
    found = []
    for value in BAD:
        try:
            check_table(group, {name: value}, "file")
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.model.__name__)
def test_no_refusal_of_a_setting_has_pydantics_words(group: Group) -> None:
    for name in group.fields():
        for said in refusals(group, name):
            assert not FOREIGN.search(said.partition(", not ")[0]), said


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("worker_threads", -1, "must be at least 0, not '-1'"),
        ("watchdog_s", float("inf"), "must be a finite number, not 'inf'"),
        ("watchdog_s", "1e300", "must be at most 86400, not '1e300'"),
        ("keepalive_s", "1e300", "must be at most 32767, not '1e300'"),
        ("reader_stall_timeout_s", 1e9, "must be at most 86400, not '1000000000.0'"),
        ("keys_file", "", "must be a path, not ''"),
        ("model", "", "must be a path, not ''"),
        ("watchdog_s", 0, "must be more than 0, not '0'"),
        ("watchdog_s", "soon", "must be a number, not 'soon'"),
        ("max_num_seqs", "2.5", "must be a whole number, not '2.5'"),
        ("enable_prefix_cache", "maybe", "must be true or false, not 'maybe'"),
        ("kv_memory", "2 XB", "must be a number of bytes, as in 20GiB or 512MiB, not '2 XB'"),
        ("block_size", "17", "must be 16, 32 or 64, not '17' (nearest: 16)"),
    ],
)
def test_a_rule_names_its_limit(name: str, value: object, rule: str) -> None:
    group = next(group for group in GROUPS if name in group.fields())
    with pytest.raises(ConfigError) as refused:
        check_table(group, {name: value}, "file")
    assert str(refused.value) == f"file: {name}: {rule}"


@pytest.mark.parametrize("groups", [configs.BACKEND, configs.RANKS], ids=["backend", "ranks"])
def test_no_worker_has_more_threads_than_a_machine_cores(groups: tuple[Group, ...]) -> None:
    group = next(group for group in groups if "worker_threads" in group.fields())
    check_table(group, {"worker_threads": "1024"}, "file")
    with pytest.raises(ConfigError, match="file: worker_threads: must be at most 1024, not '1025'"):
        check_table(group, {"worker_threads": "1025"}, "file")
