"""Adding tensors of several GPUs up, by writing into each other's memory.

all_reduce, all_reduce_kernels    the operation, alone or with residual and norm, and its kernels
slots, words                      whose turn a buffer is; vectors that are their own flag
"""
