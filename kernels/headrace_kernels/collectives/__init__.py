"""All-reduce over GPUs that write into each other's memory.

all_reduce, all_reduce_kernels    the operation, alone or with residual and norm, and its kernels
slots, words                      whose turn a buffer is; vectors that are their own flag
"""
