"""Several tokens of a row from one pass: drafts, and which of them the model agrees with.

    drafter             what proposes a row's next tokens, as the runners ask it
"""
