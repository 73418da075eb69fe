"""The choice of tokens from logits, and what rows remember for it.

    sampler             one draw for the whole batch, and the log probabilities asked for
    row_parameters      sampling options by row, on the device
    logit_changes       biases, banned and bad tokens; penalty_slots: token counts for penalties
    prompt_logprobs     log probabilities of prompt tokens

The arithmetic on logits is `headrace_kernels.sampling`.
"""
