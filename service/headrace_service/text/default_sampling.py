"""What a model folder recommends for sampling, as requests get it.

Owns the way of a recommendation into the ranges of the public API, which a caller who reads the
defaults and sends them back must be able to ask for, and the words for what was changed or left out
on the way. Imports little, for the supervisor's `doctor` asks too.
"""

from __future__ import annotations

from headrace_model_folder import GenerationDefaults
from headrace_request import limits
from headrace_request.sampling import Sampling

_TEMPERATURES = (limits.MIN_TEMPERATURE, limits.MAX_TEMPERATURE)
_REPETITION_PENALTIES = (limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY)


def default_sampling(folder: GenerationDefaults) -> Sampling:
    """Returns the folder's recommendations, where it has some, in the API's ranges."""
    temperature = 1.0 if folder.temperature is None else folder.temperature
    repetition = 1.0 if folder.repetition_penalty is None else folder.repetition_penalty
    return Sampling(
        temperature=temperature and _within(temperature, _TEMPERATURES),
        top_p=1.0 if folder.top_p is None else folder.top_p,
        top_k=folder.top_k or 0,
        min_p=folder.min_p or 0.0,
        repetition_penalty=_within(repetition, _REPETITION_PENALTIES),
    )


def not_followed(folder: GenerationDefaults) -> tuple[str, ...]:
    """Returns a line for each recommendation that requests get otherwise, or not at all."""
    served = default_sampling(folder)
    lines = []
    for name, (lowest, highest), besides in (
        ("temperature", _TEMPERATURES, "0, or "),
        ("repetition_penalty", _REPETITION_PENALTIES, ""),
    ):
        asked, got = getattr(folder, name), getattr(served, name)
        if asked is not None and asked != got:
            lines.append(f"{name} {asked:g} is served as {got:g}: requests take {besides}{lowest:g} to {highest:g}")
    return (*lines, *(f"{recommended} has no effect" for recommended in folder.without_effect))


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
