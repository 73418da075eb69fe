"""Several tokens of a row from one pass: drafts, and which of them the model agrees with.

    drafter             what proposes a row's next tokens, as the runners ask it
    speculation         the order around a step, the rows' drafts, and a drafter that fails
    draws               a plan's draws, one by one
    reported_drafts     drafts of rows with grammars, on their way to the engine
    ngram_drafter       proposes what followed a row's last tokens before
    suffix_drafter      the same from earlier answers of the row's tenant too
    drafted_rows        the rows that a draft model drafts for (`step.cpu_draft_model`)
    deferred_steps      steps that it need not follow yet, and what rows are behind
    noted_tokens        those steps' tokens on the device (`step.gpu_draft_model`)
    followed_passes     the sizes and inputs of its captured passes over such tokens

The arithmetic is `headrace_kernels.speculation`; which draws see which drafts before them is
`sampling.drafted_draws`.
"""
