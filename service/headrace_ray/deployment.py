"""What a program calls to have a deployment on a Ray cluster: `up`, `status`, `down`.

    from headrace_ray import config, deployment
    status = deployment.up(config.load(pathlib.Path("ray.toml")))

Owns the connection to the cluster and the controller's start and end. A program that has connected
to Ray already keeps its connection; any other is connected to the cluster of `address`, and none is
ever started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError

from headrace_health.address import joined
from headrace_ray import member, nodes
from headrace_ray.authority import Authority
from headrace_ray.config import Autoscaling, Engines, RayConfig, service_config
from headrace_ray.controller import Controller
from headrace_ray.errors import DeploymentError
from headrace_ray.head import check_head
from headrace_ray.member import NAMESPACE
from headrace_ray.reports import Status
from headrace_supervisor.settings import ConfigError

_PAUSE_S = 0.5
_ANSWER_S = 60.0
# Starts of engines that may fail before the deployment is given up, while none ever served.
_MOST_FAILURES = 3
_CONTROLLER = "controller"


def _ignore(_: Status) -> None:
    pass


def up(
    config: RayConfig,
    address: str | None = None,
    *,
    wait_s: float = 600.0,
    progress: Callable[[Status], None] = _ignore,
) -> Status:
    """Has a deployment run on a cluster, and returns once its first engine and a service serve.

    Where it runs already, its `[engines]` and `[autoscaling]` are changed to these; no engine ends
    but those that are too many now.

    Args:
        config: the deployment.
        address: HOST:PORT of the cluster's head; None: RAY_ADDRESS, or the cluster of this machine.
        wait_s: seconds until the deployment is left to itself, and TimeoutError raised.
        progress: called with each status while it is waited for.

    Raises:
        DeploymentError: no cluster; another deployment of this name; engines that refuse to start
            (then nothing is left on the cluster).
        ConfigError: `[service]` does not go with the address of a node.
        TimeoutError: nothing serves after `wait_s`; the deployment goes on trying.
    """
    connect(address)
    _check_services(config)
    _start_controller(config)
    deadline = time.monotonic() + wait_s
    while True:
        found = status(config.name)
        progress(found)
        if _serves(found):
            return found
        if found.failures >= _MOST_FAILURES and not found.served:
            down(config.name)
            raise DeploymentError(f"{config.name}: its engines do not start: {found.why}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{config.name} does not serve after {wait_s:g} s; it goes on trying{_lacking(found)}")
        time.sleep(_PAUSE_S)


def status(name: str, address: str | None = None) -> Status:
    """Returns what a deployment is now. Raises DeploymentError: there is none, or it is silent."""
    connect(address)
    found: Status = _ask(_controller(name).status.remote())
    return found


def down(name: str, address: str | None = None) -> None:
    """Ends a deployment: services, then engines, each with its grace time.

    What a deployment without a controller left is removed too.

    Raises:
        DeploymentError: there is no such deployment.
    """
    connect(address)
    controller = member.actor_of(f"{name}/{_CONTROLLER}")
    if controller is None and not member.names(f"{name}/"):
        raise DeploymentError(_nothing_called(name))
    if controller is not None:
        try:
            ray.get(controller.stop.remote())
        except RayError:
            # Then nothing ends in order; but it ends.
            pass
        ray.kill(controller, no_restart=True)
    for left in member.names(f"{name}/"):
        member.remove(member.actor_of(left), None)
    for entry in ray.util.placement_group_table().values():
        if entry["name"].startswith(f"{name}/") and entry["state"] != "REMOVED":
            member.remove(None, member.group_of(entry["name"]))


def connect(address: str | None) -> None:
    """Connects this process to a cluster, if it is not yet. Raises DeploymentError."""
    if ray.is_initialized():
        return
    check_head(address)
    try:
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DeploymentError(
            f"no Ray cluster at {address or 'RAY_ADDRESS or on this machine'}: {_line(error)}"
        ) from None


def _check_services(config: RayConfig) -> None:
    """Raises ConfigError if the services' settings do not suit the address of a node."""
    # A model's folder may be a name of a hub, which is not to be fetched here.
    values = {name: value for name, value in config.service.items() if name != "model_folder"}
    for node in nodes.living():
        try:
            service_config(values, joined(node.address, config.services.port), engines_file="to-be-written")
        except ConfigError as error:
            raise ConfigError(f"[service]: {error}") from None


def _start_controller(config: RayConfig) -> None:
    name = f"{config.name}/{_CONTROLLER}"
    running = member.actor_of(name)
    authority = Authority.new(config.name)
    if running is not None:
        present, authority = _ask(running.deployed.remote())
        if present == config:
            return
        if _fixed(present) != _fixed(config):
            raise DeploymentError(
                f"{config.name} runs with other settings, of which only [engines] min, max, ports and drain_s and "
                "[autoscaling] can change while it does; headrace ray down ends it"
            )
        # What it keeps, the next one finds by names.
        ray.kill(running, no_restart=True)
        _wait_gone(name)
    elif member.names(f"{config.name}/"):
        raise DeploymentError(f"{config.name} has lost its controller; headrace ray down removes what is left of it")
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    # Its answers are short; `stop` takes as long as the last stream.
    remote = ray.remote(Controller).options(**options, max_restarts=-1, max_task_retries=-1, max_concurrency=8)
    try:
        controller = remote.remote(config, authority)
    except ValueError:
        raise DeploymentError(f"{config.name} is being brought up by somebody else") from None
    _ask(controller.status.remote())


def _fixed(config: RayConfig) -> RayConfig:
    """Returns what of a configuration cannot change while its deployment runs."""
    takes = Engines(cpus=config.engines.cpus, resources=config.engines.resources)
    return config.model_copy(update={"engines": takes, "autoscaling": Autoscaling()})


def _wait_gone(name: str) -> None:
    deadline = time.monotonic() + _ANSWER_S
    while member.actor_of(name) is not None:
        if time.monotonic() > deadline:
            raise DeploymentError(f"{name} does not end")
        time.sleep(_PAUSE_S)


def _controller(name: str) -> Any:
    found = member.actor_of(f"{name}/{_CONTROLLER}")
    if found is None:
        raise DeploymentError(_nothing_called(name))
    return found


def _nothing_called(name: str) -> str:
    running = [each.partition("/")[0] for each in member.names("") if each.endswith(f"/{_CONTROLLER}")]
    return f"the cluster has no deployment {name}; it has {', '.join(running) or 'none'}"


def _ask(question: Any) -> Any:
    try:
        return ray.get(question, timeout=_ANSWER_S)
    except RayError as error:
        raise DeploymentError(f"the controller does not answer: {_line(error)}") from None


def _serves(status: Status) -> bool:
    both = (status.engines, status.services)
    return all(any(report.state == "serving" for report in members.values()) for members in both)


def _lacking(status: Status) -> str:
    """Returns what all engines wait for, if they wait for a node."""
    if not status.engines or any(report.state != "placing" for report in status.engines.values()):
        return ""
    return f", and no node has room for {status.takes}"


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
