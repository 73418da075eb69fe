"""Whether a caller who left did so because its deadline passed.

gRPC's clients end their calls themselves when their deadlines pass. A caller's clock begins when it
calls and ours when the call arrives, so its end of the call may be here before our deadline is: by
the way of the call, and by what it waited on a busy machine.
"""

from __future__ import annotations

# So much earlier than the deadline a caller still leaves for it: this part of the time that it had,
# and no more than this.
_PART = 10
_MOST_NS = 100_000_000


def left_for_deadline(arrival_ns: int, deadline_ns: int | None, now_ns: int) -> bool:
    """Whether a call that its caller ends now ends for its deadline.

    Args:
        arrival_ns: CLOCK_MONOTONIC of the call's arrival.
        deadline_ns: CLOCK_MONOTONIC of its deadline; None: it has none.
        now_ns: CLOCK_MONOTONIC of its end.
    """
    if deadline_ns is None:
        return False
    return now_ns >= deadline_ns - min((deadline_ns - arrival_ns) // _PART, _MOST_NS)
