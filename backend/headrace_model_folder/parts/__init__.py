"""Parts of a description: what they consist of, and those that are long enough for a file.

named_tensors       projections, norms and vectors, by the names of their tensors
linear_attention    layers whose sequences have a state of fixed size
"""
