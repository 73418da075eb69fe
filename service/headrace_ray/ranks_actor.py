"""The actor of an engine's ranks on a further node: it supervises an agent (`headrace ranks`).

Owns the way from the engine's actor to a running agent: where the backend listens, a certificate,
the settings that a host decides itself. The agent joins again by itself whenever the backend is
back; an agent that is given up, or whose engine's actor is gone, has the controller put another
engine in place of the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from ray.exceptions import ActorUnavailableError, RayActorError

from headrace_backend.rank_agent.config import RanksConfig
from headrace_ray import nodes
from headrace_ray.authority import Authority
from headrace_ray.reports import Report, State
from headrace_ray.supervised import Supervised
from headrace_supervisor import config as configs

_LOOK_S = 1.0
_GRACE_S = 10.0


class RanksSpec(NamedTuple):
    """What the actor is made from.

    Attributes:
        name: of its engine and its place there, in logs.
        settings: of `headrace backend`, of which the agent takes those that are its own.
        authority: signs the certificate that it shows to the engine.
        engine: handle of the engine's actor, which knows its address.
    """

    name: str
    settings: Mapping[str, Any]
    authority: Authority
    engine: Any


class Ranks:
    """The ranks of one node. All methods but the first are called by Ray, in one event loop."""

    def __init__(self, spec: RanksSpec) -> None:
        self._spec = spec
        self._node = nodes.own()
        self._process = Supervised()
        self._following: asyncio.Task[None] | None = None
        self._failure = ""

    async def start(self) -> None:
        """Starts the agent as soon as its engine has an address."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def report(self) -> Report:
        """Returns what the agent does now; serving: it runs."""
        failure = self._failure or self._process.failure
        state: State = "failed" if failure else "serving" if self._process.runs else "starting"
        return Report(state, self._node.node_id, "", None, failure, self._process.restarts)

    async def stop(self) -> None:
        """Ends the agent and its workers."""
        if self._following is not None:
            self._following.cancel()
        await self._process.stop(_GRACE_S)

    async def _follow(self) -> None:
        """Starts the agent, and ends it with the engine's actor."""
        try:
            while not (address := (await self._asked()).address):
                await asyncio.sleep(_LOOK_S)
            # Fetching a model of a hub takes minutes.
            config = await asyncio.to_thread(self._config, address)
            self._process.start(self._spec.name, "headrace_backend.rank_agent", config.model_dump_json())
            while True:
                await asyncio.sleep(_LOOK_S)
                await self._asked()
        except RayActorError:
            self._failure = "its engine's actor is gone"
            await self._process.stop(_GRACE_S)
        except Exception as error:
            # Nobody waits for this task: the report says what is wrong.
            self._failure = f"{type(error).__name__}: {error}"

    async def _asked(self) -> Report:
        """Returns what the engine's actor says. Raises RayActorError: it is gone."""
        while True:
            try:
                report: Report = await self._spec.engine.report.remote()
            except ActorUnavailableError:
                await asyncio.sleep(_LOOK_S)
            else:
                return report

    def _config(self, address: str) -> RanksConfig:
        """Returns the settings of the agent on this node. Raises ConfigError."""
        files = self._spec.authority.client_files(self._process.folder, "ranks")
        own = {name: value for name, value in self._spec.settings.items() if name in RanksConfig.model_fields}
        shown = {"ca": files.ca, "cert": files.certificate, "key": files.key}
        tls = {f"engine_tls_{name}": str(path) for name, path in shown.items()}
        return configs.load_ranks({**own, "join": address, **tls}, None)
