"""Weights of few bits: what their bytes mean, and products with them.

quantized_weight, block_weight        layouts: scales by group or channel; small blocks with scales
                                      of their own (`nf4`, `gguf_blocks`)
linear                                the product, and which kernel takes which number of rows
row_kernels, nibble_row_kernels       one row
few_kernels, small_kernels            a few
wide_kernels, warpgroup_kernels       hundreds, and restoring into `restored_weights`
restored_linear                       more, and all without a card: by restored rows
numbers                               device functions that all of them share
fp8_activations, int8_activations     products of tokens that are rounded too
input_rounding                        inputs rounded as a scheme says, and back
block_linear, block_linear_kernels    products with blocks
input_order, stored_rows              inputs in a weight's own order; rows of an embedding
"""
