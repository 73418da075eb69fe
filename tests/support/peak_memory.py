"""How much memory a process takes at most while something happens to it."""

from __future__ import annotations

import pathlib
import re

MIB = 1 << 20
# "Reset the peak" of proc(5)'s clear_refs.
_PEAK = "5"


class PeakMemory:
    """Resident memory of a process from now on; Linux keeps the peak, so that none is missed.

    Args:
        pid: the process, one of this user's.
    """

    def __init__(self, pid: int) -> None:
        self._folder = pathlib.Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text(_PEAK)
        self._before = self._bytes("VmRSS")

    @property
    def growth(self) -> int:
        """Bytes by which the peak since then exceeds what was resident at first."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB$", (self._folder / "status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10
