"""Products of 2 to 16 rows with weights of 8 and 4 bits on sm_90, with all that is fused.

stream_sm90       the kernel, its launch, which weights it takes
block_sums        in the kernel: scales of FP8's blocks, and sums that are multiplied by them
operands          in the kernel: words become numbers in registers, and x lies in their order
"""
