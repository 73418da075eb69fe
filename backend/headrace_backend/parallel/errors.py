"""How the loss of another rank shows in this one, without torch."""

from __future__ import annotations


class PeerLost(RuntimeError):
    """A rank that this one computes with is gone or broken.

    Which one, and why, is seen by whoever started them: this rank is not at fault.
    """
