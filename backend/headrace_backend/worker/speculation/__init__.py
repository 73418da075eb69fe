"""Several tokens of a row from one pass: drafts, and which of them the model agrees with.

    drafter             what proposes a row's next tokens, as the runners ask it
    speculation         the order around a step, the rows' drafts, and a drafter that fails
    draws               a plan's draws, one by one
    ngram_drafter       proposes what followed a row's last tokens before

The arithmetic is `headrace_kernels.speculation`; which draws see which drafts before them is
`sampling.drafted_draws`.
"""
