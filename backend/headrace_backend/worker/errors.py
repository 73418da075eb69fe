"""How a worker fails, in classes that `main` can catch without importing torch."""

from __future__ import annotations


class StartRefused(ValueError):
    """Configuration and model, or configuration and machine, contradict each other; a restart can't help. The message names field, value and limit."""


class DoesNotFit(StartRefused):
    """The memory there is can't hold the model. The message has the arithmetic."""


class StepFailed(Exception):
    """A step raised; the cause is chained."""

    def __init__(self, step_id: int) -> None:
        super().__init__(f"step {step_id} failed")
        self.step_id = step_id
