"""Mixtures of experts: which experts compute a token, and the products of those alone.

routing          a token's likeliest experts, and pairs of token and expert sorted by expert
expert_weights   the weights of all experts side by side, plain or quantized
mixture          the experts' MLPs and the sum of their outputs, by the number of tokens; its
                 kernels are `mixture_kernels`

Routing stays on the device: grids depend on the number of tokens alone, so that a step is captured
once and nothing compiles late whatever the routing.
"""
