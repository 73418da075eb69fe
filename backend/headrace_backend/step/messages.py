"""Messages between the backend and a worker that are not steps.

They are start-up progress, the memory plan, notices, readiness and failure.

Owns their fields and byte form (msgpack with a tag). They are rare; steps go as columns (`plan`).
Every ring record starts with one byte, its kind, so that both travel in one ordered channel.
"""

from __future__ import annotations

import enum

import msgspec


class RecordKind(enum.IntEnum):
    """The first byte of a ring record, which says what the record is."""

    STEP_PLAN = 1  # engine -> worker, StepPlan bytes
    SHUTDOWN = 2  # engine -> worker, empty: finish what was planned, then exit 0
    MASKS = 6  # engine -> worker, StepMasks bytes: behind the plan of the same step
    RESET = 5  # engine -> worker, empty: after StepRaised, begin anew with an empty batch
    STEP_RESULT = 3  # worker -> engine, StepResult bytes
    MESSAGE = 4  # worker -> engine, a WorkerMessage
    DRAFTS = 7  # worker -> engine, StepDrafts bytes: before the result of the same step


class MemoryPlan(msgspec.Struct, tag="memory_plan", frozen=True):
    """How the device's memory is divided, in bytes.

    The plan is estimated before anything is allocated; on a GPU it is made again when all of it was
    measured.
    """

    device: str
    # Memory the worker may use in all.
    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    kv_cache_bytes: int
    kv_block_bytes: int
    num_blocks: int
    block_size: int
    # Whether weights, activations, graphs and the rest were measured.
    is_measured: bool = False
    # All of the device's memory, whoever uses it; 0: not reported (a CPU).
    device_bytes: int = 0
    # The driver's and libraries' own memory on the device.
    other_bytes: int = 0
    # What stays free.
    reserve_bytes: int = 0
    # Most host memory that is pinned while weights are read.
    pinned_host_bytes: int = 0
    # Residual streams on their way between pipeline stages; 0: there is one stage.
    stream_bytes: int = 0
    # States that all rows have in recurrent layers; 0: there are none.
    state_bytes: int = 0
    # Cache groups, each of which has blocks of its own for the same tokens.
    num_cache_groups: int = 1
    # States of recurrent layers that can be kept for prefixes, and what they take.
    num_checkpoints: int = 0
    checkpoint_bytes: int = 0
    # Cosines and sines of all positions of the context, of which every rank has all; 0: nothing
    # rotates.
    rotary_bytes: int = 0


class QuantizationReport(msgspec.Struct, tag="quantization", frozen=True):
    """How weights were quantized.

    Relative errors are ||quantized - original|| / ||original|| of checkpoint tensors, measured
    while they were read.
    """

    # Of the layers; empty: they were not.
    scheme: str = ""
    # Inputs that share a scale; 0: all of an output's.
    group_size: int = 0
    # Of a quantized weight of the layers, scales and zero points included.
    bits_per_weight: float = 0.0
    mean_relative_error: float = 0.0
    worst_relative_error: float = 0.0
    worst_tensor: str = ""
    # The same of the output layer; empty: it was not.
    head_scheme: str = ""
    head_bits_per_weight: float = 0.0
    head_relative_error: float = 0.0
    # How the layers' products round their inputs; empty: they do not.
    activations: str = ""
    # Quantized tensors of the layers, which means are taken over.
    num_tensors: int = 0


# The phase of a start in which torch and Triton are loaded, for who waits.
TORCH_PHASE = "torch"


class LoadProgress(msgspec.Struct, tag="load_progress", frozen=True):
    """How far a start-up phase is; it is also a sign of life for the watchdog."""

    phase: str
    done: int
    # 1: only the phase's time is known.
    total: int
    unit: str
    # More about what is done now, in words.
    detail: str = ""


class WorkerReady(msgspec.Struct, tag="worker_ready", frozen=True):
    """The worker takes steps from now on."""

    device: str
    num_blocks: int
    block_size: int
    parameter_count: int
    # Seconds per start-up phase.
    phases_s: dict[str, float]
    # Weights read per second, in 10^9 bytes; 0 if none were read.
    load_gb_s: float = 0.0
    # The plan that is in force.
    memory: MemoryPlan | None = None
    # Tokens of the steps with prompts that are replayed from graphs, ascending: shorter ones are
    # padded to the next. None without graphs.
    captured_mixed_sizes: tuple[int, ...] = ()
    # Measured at start: bytes read and written per second by a copy, floating-point operations per
    # second of a large product; 0: not measured.
    copy_bytes_per_s: float = 0.0
    matmul_flops_per_s: float = 0.0
    # None where no weight was quantized.
    quantization: QuantizationReport | None = None
    # Marks of progress that a step sets on the board, at least: its layers on a CPU; on a GPU,
    # where the host launches and sees no more, 1.
    marks_per_step: int = 1
    # Most tokens that a step settles for a row that decodes; 1: it drafts none.
    tokens_per_row: int = 1
    # Graphs of decodes with drafts, by tokens ascending: tokens, and microseconds when all of them
    # are padding. None where nothing is drafted, or not captured.
    drafted_graphs: tuple[tuple[int, float], ...] = ()
    # States of recurrent layers that can be kept for prefixes.
    num_checkpoints: int = 0


class Notice(msgspec.Struct, tag="notice", frozen=True):
    """One line that the operator should see: the worker goes on, but not as it might."""

    text: str


class WorkerFailed(msgspec.Struct, tag="worker_failed", frozen=True):
    """The worker can't go on and exits.

    `invalid_model`: the folder or the configuration is at fault, so a restart can't help.
    """

    reason: str
    invalid_model: bool
    # Steps that were not computed because of it; 0 if it was no step.
    step_id: int = 0
    # The folder is at fault only in that the memory can't hold it.
    does_not_fit: bool = False
    # Another rank is what failed; this one only noticed.
    peer_lost: bool = False


class StepRaised(msgspec.Struct, tag="step_raised", frozen=True):
    """A step could not be computed, and the worker goes on.

    A small step of its own has succeeded since.

    It passes over all plans until RESET.
    """

    reason: str
    step_id: int


WorkerMessage = MemoryPlan | LoadProgress | WorkerReady | Notice | WorkerFailed | StepRaised

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerMessage)


def encode_message(message: WorkerMessage) -> bytes:
    """Returns the bytes of one message, tag included."""
    return _encoder.encode(message)


def decode_message(data: bytes | memoryview) -> WorkerMessage:
    """Reads what `encode_message` wrote. Raises msgspec.ValidationError on anything else."""
    message: WorkerMessage = _decoder.decode(data)
    return message
