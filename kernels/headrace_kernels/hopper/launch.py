"""What launchers of sm_90's kernels do on the host.

Owns descriptors for the copy engine (TMA), the alignment that it asks for, and how many programs a
multiprocessor holds.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Shared memory of a multiprocessor of sm_90.
_MULTIPROCESSOR_BYTES = 228 << 10
# Shared memory of a program beside its slots: barriers, and what the card keeps for itself.
BARRIER_BYTES = 1 << 10
# Shared memory that a program's slots may take, where it is alone on its multiprocessor.
MOST_SLOT_BYTES = 226 << 10
_REGISTERS = 65_536
# The widest pattern in which tiles lie in shared memory such that no read waits for a bank.
_WIDEST_SWIZZLE = 128


def aligned(matrix: Tensor) -> Tensor:
    """The matrix, or a copy of it that is contiguous and begins at a multiple of 16 bytes.

    The copy engine, and copies of 16 bytes each, read from such places alone.
    """
    matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % 16 == 0 else matrix.clone()


def tile_descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor by which the copy engine reads tiles of a matrix.

    Args:
        matrix: [num_rows, num_columns], contiguous, at a multiple of 16 bytes.
        rows: Rows of a tile.
        columns: Columns of a tile: 32, 64 or 128 bytes of each row, or more in multiples of 128.
    """
    swizzle = min(_WIDEST_SWIZZLE, columns * matrix.element_size())
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=matrix.element_size() * 8, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


def box_descriptor(view: Tensor, box: list[int], swizzled: bool = True) -> TensorDescriptor:
    """Descriptor by which the copy engine reads boxes of a view in one copy.

    Args:
        view: Tensor of up to five dimensions, of which the last is contiguous; the others' strides
            are multiples of 16 bytes.
        box: Sizes of a box. Its numbers lie in shared memory in the order of the dimensions.
        swizzled: Rows of 64 bytes, or of 128, lie such that no read of a tile waits for a bank.
    """
    width = min(_WIDEST_SWIZZLE, box[-1] * view.element_size()) if swizzled else 0
    layout = gl.NVMMASharedLayout(width, element_bitwidth=view.element_size() * 8, rank=view.ndim)
    return TensorDescriptor.from_tensor(view, box, layout)


def programs_at_a_time(num_warps: int, registers: int, slot_bytes: int) -> int:
    """Programs that a multiprocessor of sm_90 holds, at least 1.

    Args:
        num_warps: Warps of a program.
        registers: Registers of a thread.
        slot_bytes: Shared memory of a program without barriers.
    """
    by_registers = _REGISTERS // (32 * num_warps * registers)
    return max(1, min(by_registers, _MULTIPROCESSOR_BYTES // (slot_bytes + BARRIER_BYTES)))
