"""structlog without rich.

structlog imports rich wherever it is installed, and no setting leaves it out. It would use it for
tracebacks that print local variables, which hold what no log may show; every process of a server
would pay 50 ms of its start for it. Whoever imports this first has structlog as it is where rich is
not installed. rich itself can be imported afterwards, for bars and tables.
"""

from __future__ import annotations

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    # An import of a module that is None fails as if there were none.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
