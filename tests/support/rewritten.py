"""The tests' modules, rewritten by pytest once for all of its processes.

Owns the sharing alone. pytest gives every `assert` of a test's module its explanation, and keeps
the result beside the module. In a fresh clone nothing is kept yet, and as all processes import the
same modules in the same order, each would rewrite all of them: 9 s of CPU. So each begins with a
part of its own.
"""

from __future__ import annotations

import pathlib

import pytest
from _pytest.assertion import rewrite

_TESTS = pathlib.Path(__file__).parents[1]


def rewrite_share(config: pytest.Config, index: int, count: int) -> None:
    """Rewrites each `count`-th module from the `index`-th on, where nothing newer is kept.

    pytest offers no call for that, so these are its own, of the version that is pinned. A module
    that can't be read or parsed is left to whoever imports it and reports it.
    """
    state = config.stash[rewrite.assertstate_key]
    for path in sorted(_TESTS.rglob("test_*.py"))[index::count]:
        folder = rewrite.get_cache_dir(path)
        kept = folder / (path.name[:-3] + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(folder):
            try:
                source_hash, code = rewrite._rewrite_test(path, config)
            except (OSError, SyntaxError, ValueError):
                continue
            rewrite._write_pyc(state, code, source_hash, kept)
