"""Whether the weights of a folder or file look packed as it says: mistakes of other tools.

`headrace doctor --weights` asks; a server that loads the same weights checks shapes, types, ranges
and finite scales, and does not look for these. The model is loaded as a worker loads it, on one
rank, and then its numbers are read back:

    __main__            a folder in, JSON out: `python -m headrace_backend.packing`
    findings            numbers of each quantized layer, as steps between its scales, summed up
    layer_statistics    the sums, and why they say how a layer was packed
    faults              the rules: what no correctly packed layer shows

Nobody imports this room.
"""
