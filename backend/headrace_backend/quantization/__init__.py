"""What a layer's product multiplies by: three kinds of weight behind one interface.

    linear_weight   the interface (`destination`, `finish`, `report`), and the first kind: plain
    low_bit_weight  the second kind, numbers with scales, and those whose rows are quantized as they
                    come; stored_weight: those of another tool's layers
    block_linear_weight  the third kind, blocks as a file has them (GGUF's types, NF4); nf4_weight:
                    those whose rows are rounded to NF4 as they come
    mixed_format_weight   projections of different formats side by side
    head_weight     the output layer's weight of 8 bits
    make_weight     which of them a placement asks for

A weight is filled by rows of its checkpoint's tensors, and finished once all of them are there:

    shared_scales   scales of whole rows where ranks have parts of them
    folder_layers   all layers of a folder of another tool; staged_layer: one, from its tensors to
                    our layout; layer_part: what a rank reads of them; source_numbers: the bits of
                    each format
    tensor_error    how far each rounded tensor is from what was read, and how far it may be
    product_check   each product against the numbers that the bits stand for
    summaries       the order of all checks, and what operators read; rounded_inputs: how
                    products round their inputs

Layers hold weights and know no scheme. How numbers of few bits lie in memory and are multiplied is
`headrace_kernels`' business. Whether other tools packed their layers as they say is asked by
`headrace_backend.packing`, and not when a server loads them.
"""
