"""What an operator does to the models, whatever the wire.

The wires are headrace.v1's AdminService and KServe's model repository.

Owns the steps: the request goes to the supervisor, which acts for all service processes, and is
answered when this process has seen what came of it. Without a supervisor (`headrace service` alone)
there is nobody to load or unload, and a drain is this process's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from headrace_protos.control.v1 import control_pb2
from headrace_service import errors
from headrace_service.engines.control_client import ControlClient
from headrace_service.engines.served_model import ServedModel
from headrace_service.engines.served_models import ServedModels, engine_addresses
from headrace_service.errors import ServiceError

# What the supervisor says reaches services within milliseconds; a model's tokenizer takes some
# seconds to read.
_SEEN_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.02
_DRAIN_LOAD_S = 5.0
Found = TypeVar("Found")


class ModelAdmin:
    """Loading, unloading, listing and draining.

    Args:
        models: what this process serves.
        control: the way to the supervisor; None without one.
    """

    def __init__(self, models: ServedModels, control: ControlClient | None) -> None:
        self._models = models
        self._control = control

    def repository(self) -> list[control_pb2.ModelBackend]:
        """All models of the repository folder and those served, by name.

        Raises:
            ServiceError: UNAVAILABLE; FAILED_PRECONDITION without a supervisor.
        """
        self._supervisor()
        if self._models.repository is None:
            raise errors.unavailable("the models are not known yet")
        return list(self._models.repository.models)

    async def load(self, name: str, memory_bytes: int = 0) -> tuple[ServedModel, bool]:
        """Has a model loaded, and waits until this process serves it.

        Args:
            name: of a folder of the repository.
            memory_bytes: its memory budget; 0: what the settings say.

        Returns:
            The model, and whether it served already.

        Raises:
            ServiceError: INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, RESOURCE_EXHAUSTED as
                the supervisor says; UNAVAILABLE.
        """
        loaded = await self._supervisor().load(name, memory_bytes)
        addresses = engine_addresses(loaded.model)

        def found() -> ServedModel | None:
            engines = [model for model in self._models if model.address in addresses.values()]
            if not engines or not all(map(_has_loaded, engines)):
                return None
            return engines[0].reached()

        return await _seen(found, f"model {errors.echo(name)} was loaded, but cannot be reached"), loaded.existing

    async def unload(self, name: str, grace_ns: int) -> None:
        """Has a model unloaded: no new generations, open ones go on for the grace time.

        Raises:
            ServiceError: NOT_FOUND; UNAVAILABLE; FAILED_PRECONDITION without a supervisor.
        """
        await self._supervisor().unload(name, grace_ns)
        await _seen(lambda: all(model.name != name for model in self._models), "the model is gone, but still listed")

    async def drain(self, draining: bool) -> tuple[int, int]:
        """Takes no new generations on any model, or takes them again.

        Returns:
            Running sequences and waiting requests, over all models that can be reached.

        Raises:
            ServiceError: UNAVAILABLE; the supervisor cannot be reached.
        """
        if self._control is None:
            self._models.set_draining(draining)
        else:
            await self._control.set_draining(draining)
            await _seen(lambda: self._models.draining == draining, "the supervisor took it, but did not say so")
        running = waiting = 0
        for model in self._models:
            with contextlib.suppress(ServiceError, TimeoutError):
                load = await asyncio.wait_for(model.engine.load(), _DRAIN_LOAD_S)
                running += load.running_sequences
                # What is preempted neither runs nor waits for its first step, and is not over.
                waiting += max(load.waiting_requests, load.active_requests - load.running_sequences)
        return running, waiting

    def _supervisor(self) -> ControlClient:
        if self._control is None:
            raise errors.failed_precondition("this service runs without a supervisor, which loads and unloads models")
        return self._control


def _has_loaded(model: ServedModel) -> bool:
    """Whether this process has seen the end of a load.

    The model then takes generations, unless the server is drained, or it can't be served here.
    """
    return bool(model.broken) or (model.is_known and model.engine.serving and not model.is_loading)


async def _seen(condition: Callable[[], Found | None], otherwise: str) -> Found:
    """Returns what the condition gives, as soon as it gives something.

    Raises ServiceError: UNAVAILABLE.
    """
    try:
        async with asyncio.timeout(_SEEN_WITHIN_S):
            while not (found := condition()):
                await asyncio.sleep(_LOOK_EVERY_S)
            return found
    except TimeoutError:
        raise errors.unavailable(otherwise) from None
