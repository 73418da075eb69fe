"""Whether this process would answer a generation that arrives now, by the names that are asked for.

Owns the names. SERVING means progress, not a live process: it follows the engine's own state, and a
state grown stale counts as not serving. Who asks is answered by `headrace_health`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headrace_health.servicer import Serves

_ENGINE = "engine/"


def serves(
    is_serving: Callable[[], bool], service_names: Iterable[str], engines: Callable[[], Mapping[str, bool]]
) -> Serves:
    """Returns what answers whether a service of this process serves.

    Args:
        is_serving: whether the process serves.
        service_names: the services known, besides "" for the whole server.
        engines: the engines of the configuration and whether each serves; they are known as
            "engine/ADDRESS".
    """
    known = {"", *service_names}

    def answer(service: str) -> bool | None:
        if service in known:
            return is_serving()
        return engines().get(service.removeprefix(_ENGINE)) if service.startswith(_ENGINE) else None

    return answer
