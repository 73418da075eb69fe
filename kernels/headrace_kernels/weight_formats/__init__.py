"""What the bytes of a quantized weight mean, in plain PyTorch and in kernels.

quantized_weight      8 and 4 bits with scales by group or output
block_weight          small blocks with scales of their own: GGUF's types and NF4
block_numbers         device functions: numbers and scales of those blocks
gguf_blocks, nf4      blocks as GGUF files hold them; NF4's rounding and bitsandbytes' bytes
mxfp4                 4-bit numbers under powers of two; its device function is here too
mxfp4_operands        device functions: those numbers in registers of sm_90's tensor cores, in Gluon
stored_rows           values that other tools quantized, put into the layout of `quantized_weight`
kernel_layout         a `quantized_weight` as kernels take it
scale_places          device function: where scales of 8-bit numbers are
conversions           device functions: packed words become bf16 or fp16
dequantized_buffer    one buffer per GPU for weights that are dequantized for a product
"""
