"""A process of a server has structlog without rich, and may have rich besides."""

from __future__ import annotations

import subprocess
import sys

from tests.support.running_server import environment

_PROGRAM = """
import sys
import headrace_telemetry.main
print("structlog" in sys.modules, "rich" in sys.modules)
import rich, structlog
print(rich.__name__, structlog.dev.rich)
"""


def test_a_process_loads_rich_only_for_what_it_shows_itself() -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment(), capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["True False", "rich None"], ended.stderr
