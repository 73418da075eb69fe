"""Products of activations and weights, by the format of the weight and by their shape.

dense                        plain weights: cuBLAS, oneDNN, or `dense_small_batch` with its kernels
                             (`dense_small_batch_kernels`, of 2 to 32 rows on sm_90
                             `dense_small_batch_sm90`), which fuses norm, SwiGLU and residual
gated                        gate and up projections with the activation in them, tens of rows
quantized, launch_rules      weights of 8 and 4 bits: which kernel takes which number of rows, and
                             with which tile
gemv_8bit, gemv_int4         one row
small_batch                  2 to 16 rows, every card
small_batch_8bit_sm90        2 to 64 rows of 8-bit weights, on sm_90
few_bits                     2 to 16 rows of 8 bits, FP8's blocks of 128 by 128 too, and of INT4 in
                             groups of 128, on sm_90, with norm, SwiGLU and residual in them
gemm_weight_only             hundreds of rows, and weights dequantized in memory
gemm_weight_only_sm90        the same product on sm_90
gemm_dequantized             more rows, and all without a GPU: by dequantized weights
gemm_fp8                     tokens in FP8 as well
cublas                       cuBLAS with a tile that is named here, for tokens in FP8 and in bf16
gemm_int8                    tokens in INT8 as well
block_quantized              weights in blocks (GGUF, NF4), kernels in `block_quantized_kernels`
input_order                  inputs gathered into a weight's own order
"""
