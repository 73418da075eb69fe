"""Ranks of one model that compute together: how they find each other, and their collectives.

    collectives    the interface that layers see: sums and gathers over ranks
    gloo           its form on a CPU; what the others do is what it does
    nccl           its form on GPUs
    symmetric      its form on GPUs that reach each other's memory: our kernels, and NCCL for what
                   is large
    stage_links    what goes from pipeline stage to pipeline stage
    rendezvous     the way of a rank into its group, and the check that all ranks are of one kind
    errors         how the loss of another rank shows (without torch)

Which part of which weight a rank keeps is `weights.placement`'s business; who starts ranks, and
what follows from a lost one, is the server's.
"""
