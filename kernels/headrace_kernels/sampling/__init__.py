"""From logits to tokens: penalties, masks, truncation, the choice and its log probability.

A row's results are the same whatever else is in the batch.

choice, choice_triton, truncation_triton    greedy, or a draw with temperature, top-k, top-p, min-p
penalties, token_masks, logprobs            each with its `*_triton`
ordering, philox                            which of two equal logits is first; noise by request and
                                            position; each with its `*_triton`
parameters                                  columns of what callers asked for
"""
