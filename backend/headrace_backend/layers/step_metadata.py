"""What layers are told of a step besides its tokens, and pass on to attention: which tokens belong to which row, and where each row's context lies.

A runner for CPUs makes the one, a runner for GPUs the other. Both are defined beside the kernels that read them.
"""

from __future__ import annotations

from typing import TypeAlias

from headrace_kernels.attention.paged import AttentionMetadata, PagedAttentionStep

StepMetadata: TypeAlias = AttentionMetadata | PagedAttentionStep
