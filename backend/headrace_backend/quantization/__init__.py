"""What a layer's product multiplies by: a plain weight or one of few bits, behind one interface.

    linear_weight   the interface, and the plain weight
    block_linear_weight  weights whose bits come from a file in blocks
    nf4_weight      rows that are rounded to NF4 as they come
    low_bit_weight  a weight of few bits: filled by rows that are quantized as they come
    make_weight     which of the two a placement asks for
    tensor_error    how far each tensor ended from what was read, and how far it may be
    stored_check    what is checked of weights that a file has in blocks
    self_check      what is checked and said once all weights are there

Layers hold weights and know no scheme. How numbers of few bits lie in memory and are multiplied is `headrace_kernels`' business.
"""
