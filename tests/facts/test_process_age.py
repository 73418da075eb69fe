"""How long a process lives is told from the kernel's own mark, whatever the process is called."""

from __future__ import annotations

import os
import pathlib
import time

import pytest

from headrace_facts.process_age import process_age_s

# This module is loaded by a process that lives already.
_LOADED_S = time.monotonic()


def test_the_age_counts_from_before_the_first_line_and_goes_on() -> None:
    first, loaded_s = process_age_s(), time.monotonic() - _LOADED_S
    # The kernel's mark is of hundredths.
    assert first >= loaded_s - 0.02
    time.sleep(0.05)
    assert process_age_s() > first + 0.02


@pytest.mark.parametrize("name", ["python3", "a b", "x) S 1 (y"])
def test_the_process_s_name_does_not_matter(tmp_path: pathlib.Path, name: str) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    begun_s = time.clock_gettime(time.CLOCK_BOOTTIME) - 7
    # Fields 3 to 21 of proc(5), then the start, and two more.
    fields = ["S", *["1"] * 18, str(int(begun_s * ticks)), "0", "0"]
    stat = tmp_path / "stat"
    stat.write_text(f"4711 ({name}) {' '.join(fields)}\n")
    assert 6.9 < process_age_s(stat) < 7.0 + 60
