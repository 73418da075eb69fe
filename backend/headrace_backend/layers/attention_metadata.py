"""The step's description for attention, as the worker builds it. Defined beside the kernels that read it; this is its name for the rest of the backend."""

from headrace_kernels.attention import AttentionMetadata

__all__ = ["AttentionMetadata"]
