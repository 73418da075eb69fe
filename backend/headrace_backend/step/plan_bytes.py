"""Bytes that a step plan may take.

Rings are sized by it, and the scheduler admits sequences by it.

Owns the arithmetic of the two parts of a plan. Its *columns* are bounded by rows and token budget,
whatever is asked. Its *admissions* are bounded by nothing but the scheduler, which counts them:
prefix hits and forks cost one token each and bring a block table and perhaps a history of the whole
context with them, and after a loss of the workers everybody is admitted again. So a plan has room
for all columns, and for the largest single admission at least; whoever finds no room waits for the
next step.
"""

from __future__ import annotations

from headrace_backend.config import EngineConfig
from headrace_backend.step.plan import FRAME_BYTES, MAX_PROMPT_LOGPROBS
from headrace_request import limits

_INT = 4
# Integers of one row: released (1); its entry (4); its draw (3); its run of prompt tokens (3); its
# forced tokens (2); copies of its state, from another line and to a checkpoint (4).
_INTS_PER_ROW = 17
# Of one row in each cache group: updates of its table for a copied block and for new ones, the last
# of which may be begun (6 and 2); its copy (2).
_INTS_PER_TABLE = 10
# Beginning of a table update.
_UPDATE_INTS = 3
# Fields of an admission that every request has, msgpack's marks included; and a model's own
# end-of-text tokens.
FIELD_BYTES = 256
_END_TOKEN_BYTES = 4096
# An admission without a history that differs from the one before it by row and output alone.
SIBLING_BYTES = 32
# Marks of a run of bytes.
RUN_BYTES = 5
# What is asked for on average, for which a plan has room in every row at once if that is not more
# than this.
_USUAL_ADMISSION_BYTES = 4096
_MAX_ADMISSIONS_BYTES = 24 << 20


def columns_bytes(config: EngineConfig, num_groups: int = 1) -> int:
    """Most bytes of a plan without its admissions, the block tables that come with these apart.

    Rows have a table in each of `num_groups` cache groups.
    """
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    budget = config.max_num_batched_tokens
    tokens = budget + num_groups * (budget // config.block_size) + min(budget, MAX_PROMPT_LOGPROBS)
    return FRAME_BYTES + _INT * ((_INTS_PER_ROW + num_groups * _INTS_PER_TABLE) * rows + tokens)


def table_bytes(num_blocks: int) -> int:
    """Bytes of a row's block table that is written at once."""
    return _INT * (_UPDATE_INTS + num_blocks)


def largest_admission_bytes(config: EngineConfig, max_model_len: int, num_groups: int = 1) -> int:
    """Most bytes of one admission with its block tables.

    The history has the length of the whole context, and every list is at its limit.
    """
    word_bytes = RUN_BYTES + _INT * limits.MAX_BAD_WORD_TOKENS
    lists = 2 * _INT * limits.MAX_LOGIT_BIAS + limits.MAX_BAD_WORD_SEQUENCES * word_bytes
    lists += _INT * limits.MAX_STOP_TOKEN_IDS + _END_TOKEN_BYTES
    num_blocks = -(-max_model_len // config.block_size)
    return FIELD_BYTES + lists + _INT * max_model_len + num_groups * table_bytes(num_blocks)


def max_plan_bytes(config: EngineConfig, max_model_len: int, num_groups: int = 1) -> int:
    """Bytes of the largest plan.

    It has all columns, and admissions of every row with a whole history, or as many as fit 24 MiB.

    Args:
        config: The engine's configuration.
        max_model_len: Longest sequence in tokens.
        num_groups: Cache groups of the model.
    """
    tables = num_groups * table_bytes(max_model_len // config.block_size)
    per_row = _INT * max_model_len + tables + _USUAL_ADMISSION_BYTES
    wanted = min(config.max_num_seqs * per_row, _MAX_ADMISSIONS_BYTES)
    largest = largest_admission_bytes(config, max_model_len, num_groups)
    return columns_bytes(config, num_groups) + max(wanted, largest)
