"""How a worker fails, in classes that `main` can catch without importing torch."""

from __future__ import annotations

from headrace_backend.parallel.errors import PeerLost
from headrace_model_folder import InvalidModelFolder

_MAX_REASON_CHARACTERS = 1000


class StartRefused(ValueError):
    """Configuration contradicts model or machine; a restart can't help.

    The message names field, value and limit.
    """


class DoesNotFit(StartRefused):
    """The memory there is can't hold the model. The message has the arithmetic."""


class StepFailed(Exception):
    """A step raised; the cause is chained."""

    def __init__(self, step_id: int) -> None:
        super().__init__(f"step {step_id} failed")
        self.step_id = step_id


def one_line(error: BaseException | None) -> str:
    """An error as a message tells it.

    What the user can mend speaks for itself; anything else needs its class.
    """
    text = " ".join(str(error).split())
    if not isinstance(error, (InvalidModelFolder, StartRefused, PeerLost)):
        text = f"{type(error).__name__}: {text}"
    return text[:_MAX_REASON_CHARACTERS]
