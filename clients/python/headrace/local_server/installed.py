"""What of the server's distribution is installed beside this client.

Owns the names by which that is found (the supervisor's module, what the extra `worker` brings, the
demo model's package) and the sentences for what is missing. Imports none of it: finding a module
costs a look at a folder, importing torch seconds.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

from headrace.local_server.process import SUPERVISOR_MODULE, LocalServerError

# Modules of the extra `worker`: what loads weights and computes.
WORKER_MODULES = ("safetensors", "torch", "triton")
# The demo model in headrace-server's wheel. A checkout that is installed editable has none, and the
# model lies in its own folder there.
DEMO_PACKAGE = "headrace_demo_model"
DEMO_IN_CHECKOUT = pathlib.PurePath("models", "demo")
_INSTALL = "pip install 'headrace-server[worker]'"


def require_server() -> None:
    """Checks that the server's distribution is installed beside this one.

    Raises:
        LocalServerError: It is not.
    """
    if not _is_installed(SUPERVISOR_MODULE):
        raise LocalServerError(
            f"a local server needs the distribution headrace-server: {_INSTALL} "
            f"(looked for {SUPERVISOR_MODULE} in {sys.prefix})"
        )


def require_worker() -> None:
    """Checks that the packages that run a model are installed.

    Raises:
        LocalServerError: Some of them are not; the message names them and the extra.
    """
    missing = [name for name in WORKER_MODULES if not _is_installed(name)]
    if missing:
        raise LocalServerError(
            f"this needs the extra `worker` of headrace-server: {_INSTALL} "
            f"(looked for {', '.join(missing)} in {sys.prefix})"
        )


def demo_model() -> pathlib.Path:
    """Returns the folder of the demo model: the installed package's, or the checkout's.

    Raises:
        LocalServerError: headrace-server is not installed, or came without the model.
    """
    require_server()
    package = importlib.util.find_spec(DEMO_PACKAGE)
    supervisor = importlib.util.find_spec(SUPERVISOR_MODULE)
    candidates = [pathlib.Path(place) / "demo" for place in (package and package.submodule_search_locations) or ()]
    if supervisor is not None and supervisor.origin is not None:
        candidates.append(pathlib.Path(supervisor.origin).parents[2] / DEMO_IN_CHECKOUT)
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    raise LocalServerError(f"this installation has no demo model ({DEMO_PACKAGE}); name a folder with --model")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
