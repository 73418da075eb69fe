"""The settings of services: those that speak gRPC, and those that speak OpenAI's HTTP API.

Owns what follows from an address for the settings beside it. Both kinds share one class
(`headrace_service.config`), and one of them listens at each address.
"""

from __future__ import annotations

from typing import Any

import pydantic

from headrace_service.config import ServiceConfig
from headrace_supervisor import settings
from headrace_supervisor.settings import ConfigError


def check_sharing(name: str, number: int, listen: tuple[str, ...]) -> None:
    """Raises ConfigError if so many processes cannot share their addresses."""
    if number > 1 and any(address.startswith("unix:") for address in listen):
        raise ConfigError(f"{name} is {number}; processes can share a HOST:PORT only, a unix: address takes 1")


def services(
    listen: tuple[str, ...], openai_listen: tuple[str, ...], values: dict[str, Any]
) -> tuple[ServiceConfig, ServiceConfig | None]:
    """Returns the settings of the services that speak gRPC, and of those that speak HTTP.

    Where one of them has unix: addresses alone, the certificate is the other's.

    Args:
        listen: addresses of gRPC.
        openai_listen: addresses of OpenAI's HTTP API; empty: it is not served.
        values: the settings that both share.

    Raises:
        ConfigError: settings do not go together.
    """
    plain = {**values, "tls_cert": None, "tls_key": None, "tls_client_ca": None}
    if not openai_listen:
        if values["openai_cors_origins"]:
            raise ConfigError("openai_cors_origins: needs openai_listen")
        return service(listen=listen, **values), None
    has_port, openai_has_port = (
        any(not address.startswith("unix:") for address in addresses) for addresses in (listen, openai_listen)
    )
    grpc_service = service(listen=listen, **(values if has_port or not openai_has_port else plain))
    openai = service(openai_listen=openai_listen, **(values if openai_has_port or not has_port else plain))
    return grpc_service, openai


def service(**values: Any) -> ServiceConfig:
    """Returns one kind's settings. Raises ConfigError where they do not go together."""
    try:
        return ServiceConfig(**values)
    except pydantic.ValidationError as error:
        raise settings.contradiction(error) from None


def with_aliases(service: ServiceConfig, aliases: tuple[str, ...]) -> ServiceConfig:
    """Returns a configuration of services that know the default model by further names."""
    return service.model_copy(update={"default_model_aliases": aliases})


def addressed(
    service: ServiceConfig, addresses: tuple[str, ...], control: str, telemetry_socket: str = ""
) -> ServiceConfig:
    """Returns a configuration of services, with addresses and private sockets filled in."""
    shares = any(not address.startswith("unix:") for address in addresses)
    private = {"control": control, "reuse_port": shares, "telemetry_socket": telemetry_socket}
    listen = {"listen": addresses} if service.listen else {"openai_listen": addresses}
    return service.model_copy(update={**listen, **private})
