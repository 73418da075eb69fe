"""Mixtures of experts: which experts compute a token, and the products of those alone.

routing          a token's likeliest experts, and pairs of token and expert sorted by expert
chunked_sort     the sort of many pairs
tile_table       which expert each tile of sorted pairs is of
scored_routing   experts that are chosen by sigmoid scores and a correction, in groups
router           the likeliest experts of few tokens, with norm and router in the same launch
expert_weights   the weights of all experts side by side, plain or quantized
gating           what an expert does between its projections
mixture          the experts' MLPs and the sum of their outputs, by the number of tokens; its
                 kernels are `mixture_kernels` (many tokens; the most on Hopper
                 `grouped_gemm_sm90` and, for what its tiles know and store, `grouped_work_sm90`)
                 and `vector_kernels` (few), for one token with plain weights or 8 bits
                 `stream_gemv`, for weights in a file's blocks `block_kernels`, and for those in
                 MXFP4 `mxfp4_kernels` (the most on Hopper `mxfp4_gemm_sm90`, step by step
                 `mxfp4_step_sm90`) and `mxfp4_gemv` (few)

Routing stays on the device: grids depend on the number of tokens alone, so that a step is captured
once and nothing compiles late whatever the routing.
"""
