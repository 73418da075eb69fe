"""`python -m headrace_hub NAME MODE`: what `resolve` asks, in a process of its own.

The hub's library takes half a second and 60 MB to import, which no server should carry along. The
answer is one line of JSON on stdout: `path` and `commit`, or `refused`. What a user should see
meanwhile goes to stderr.
"""

from __future__ import annotations

import _thread
import json
import os
import sys
import threading
import time
from typing import Any

from headrace_hub import models
from headrace_hub.errors import HubRefused
from headrace_hub.names import parsed
from headrace_hub.resolve import Need

EXIT_INTERRUPTED = 130
_LAST_WORDS_S = 5.0


def main(arguments: list[str]) -> None:
    """Answers one question."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    text, need = arguments
    try:
        answer = _answer(text, Need(need))
    except HubRefused as refused:
        answer = {"refused": str(refused)}
    except KeyboardInterrupt:
        os._exit(EXIT_INTERRUPTED)
    print(json.dumps(answer), flush=True)


def _answer(text: str, need: Need) -> dict[str, Any]:
    name = parsed(text)
    if need is Need.CONFIG:
        return {"path": str(models.config_folder(name)), "commit": ""}
    found = models.found_or_pulled(name) if need is Need.FETCHED else models.cached(name)
    return {"refused": None} if found is None else {"path": str(found.path), "commit": found.commit}


def _end_with_parent() -> None:
    """Interrupts the download at the end of stdin: the process that asks is gone, or leaves."""
    while os.read(0, 1024):
        pass
    _thread.interrupt_main()
    # Not heard by a process that was started with SIGINT ignored.
    time.sleep(_LAST_WORDS_S)
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main(sys.argv[1:])
