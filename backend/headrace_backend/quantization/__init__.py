"""What a layer's product multiplies by: a plain weight or one of few bits, behind one interface.

    linear_weight   the interface, and the plain weight
    low_bit_weight  weights of few bits; those filled by rows that are quantized as they come
    stored_weight   those whose layers another tool made, in its formats: which of our layouts holds
                    which
    parted_weight   projections of different formats side by side
    block_linear_weight  weights that keep the blocks that a file has, or rows are rounded to:
    GGUF's types, NF4
    shared_scales   scales of whole rows where ranks have parts of them
    nf4_weight      those filled by rows that are rounded to NF4 as they come
    head_weight     the output layer's, of 8 bits, and what is checked and said of it
    make_weight     which of them a placement asks for
    tensor_error    how far each tensor ended from what was read, and how far it may be
    self_check      what is checked and said once all weights are there; block_check: of weights in
                    blocks
    folder_layers   all layers of a folder of another tool; staged_layer: one, from its tensors to
                    our layout; layer_part: what a rank reads of them; source_numbers: the bits of
                    each format
    folder_check    what is checked and said of those

Layers hold weights and know no scheme. How numbers of few bits lie in memory and are multiplied is
`headrace_kernels`' business. Whether other tools packed their layers as they say is asked by
`headrace_backend.packing`, and not when a server loads them.
"""
