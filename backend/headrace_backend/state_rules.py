"""Which settings suit models whose recurrent layers keep states: what is refused before torch.

Owns the rules and their words, and whether prompts may begin with what others computed; supervisor,
backend, worker and `headrace plan` all ask here. A state holds all that a sequence has seen, so it
is there for a prefix only where a copy of it was kept.
Ranks and stages are `tp_rules`' and `pp_rules`'.
"""

from __future__ import annotations

from headrace_backend.config import EngineConfig
from headrace_model_folder import ModelConfig
from headrace_model_folder.description import ModelDescription

# Of one number of a state, which is fp32 whatever the model's type.
STATE_ITEM_BYTES = 4
# Elements of a head's matrix, its sides rounded up to powers of two, that the kernel for steps with
# drafts holds (`headrace_kernels.recurrence.decode_kernels`).
MOST_DRAFTED_ELEMENTS = 128 * 128


def unsuitable_states(config: EngineConfig, model: ModelConfig) -> str | None:
    """Explains why the model's states can't be served as configured; returns None if they can."""
    if not model.description.recurrent_layers:
        if not config.state_checkpoints:
            return None
        return (
            f"state_checkpoints is {config.state_checkpoints}, and the model ({model.architecture}) has no recurrent "
            "layers, whose states these are; without it blocks of keys and values are reused"
        )
    largest = max(_rounded(layer.key_dim) * _rounded(layer.value_dim) for layer in model.description.recurrent_layers)
    if config.speculate != "off" and largest > MOST_DRAFTED_ELEMENTS:
        return (
            f"speculate is {config.speculate}, and the model's linear attention ({model.architecture}) has a matrix of "
            f"{largest} elements for each head, of which steps with drafts take {MOST_DRAFTED_ELEMENTS} at most; "
            "speculate off works"
        )
    if config.enable_prefix_cache and config.state_checkpoints == 0:
        return (
            f"enable_prefix_cache is on, state_checkpoints is 0, and the model has recurrent layers "
            f"({model.architecture}), whose prefixes need a kept state; state_checkpoints 1 or more works"
        )
    return None


def _rounded(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def reuses_prefixes(config: EngineConfig, model: ModelDescription) -> bool:
    """Whether prompts may begin with what others computed."""
    keeps_prefixes = config.state_checkpoints != 0 or not model.recurrent_layers
    return config.enable_prefix_cache is not False and keeps_prefixes


def row_state_bytes(model: ModelDescription, num_drafts: int = 0) -> int:
    """Bytes of one row's states in all recurrent layers.

    What a step reads and writes of a row is about that without drafts, however many it verifies.
    """
    return STATE_ITEM_BYTES * sum(layer.drafted_state_elements(num_drafts) for layer in model.recurrent_layers)
