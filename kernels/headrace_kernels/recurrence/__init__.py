"""Linear attention by the gated delta rule: what a row has seen is a state of fixed size.

entries        which tokens of a step belong to which row, and where a row's state lies
delta_net      all between a layer's projections, in one launch for entries of one token (kernel in
               `decode_kernels`), or of some where tokens are drafted (`drafted_kernels`), else the
               three operations below
pending        what drafts leave of a row outside of its matrices; the layout of a row's line
convolution    the short causal convolution before the rule; the last inputs are part of the state
gated_delta    the recurrence, token by token (the reference) and in chunks (on a CPU); its kernels
               are in `gated_delta_kernels`, token by token, and `chunk_kernels`
output_norm    norm and gate of each head's output

States change in place. A row whose first token is at position 0 begins with an empty state,
whatever lies in its place. Lengths stay on the device: grids depend on the numbers of entries and
tokens alone, so that a step is captured once.
"""
