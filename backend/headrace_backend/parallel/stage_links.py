"""What goes from pipeline stage to pipeline stage: residual streams on, drawn tokens back.

    stage 0 ── stream of a step ──> stage 1 ── ... ──> last stage
       ^                                                   │
       └────────────── tokens that it drew ────────────────┘

Owns the sending and receiving of one rank, which has a peer with the same place in each other
stage. Steps come in one order everywhere, so what is received next is what was sent next, and no
message says what it is. Does not own what is sent (`worker.step.stage_runner`).

What is received is waited for where it is used: on a CPU by the caller, on a GPU by the device's
current stream. Nobody waits for what was sent, until `MOST_UNDER_WAY` further things are: then its
memory may be used again. So whoever is sent something begins to receive it without a further plan,
or the sender would wait for one. Streams and tokens go through groups of their own, because their
order among each other is not the same on both sides.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Tensors that are held because they may not have arrived: those of a step that is received while
# the next one is computed, and of that one.
MOST_UNDER_WAY = 2


class StageLinks:
    """One rank's links to other stages."""

    def __init__(
        self,
        streams: dist.ProcessGroup,
        tokens: dist.ProcessGroup | None,
        named_losses: Callable[[], contextlib.AbstractContextManager[None]],
        on_enter: Callable[[], None],
    ) -> None:
        """Takes groups that all stages have connected.

        Args:
            streams: This rank and its peers, by stage.
            tokens: The two of them in the first and in the last stage; None in stages between.
            named_losses: Has errors of a connection come out as `PeerLost`.
            on_enter: Called before each receipt, for whoever watches progress.
        """
        self._streams, self._tokens = streams, tokens
        self._stage, self._num_stages = streams.rank(), streams.size()
        self._named_losses = named_losses
        self._on_enter = on_enter
        self._under_way: dict[dist.ProcessGroup, deque[tuple[dist.Work, Tensor]]] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank is one of the first stage."""
        return self._stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is one of the last stage."""
        return self._stage == self._num_stages - 1

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self._num_stages

    def connect(self, device: torch.device) -> None:
        """Sends a number over each link; all ranks call it.

        A library connects two ranks when they first send: NCCL takes 190 ms for that, which the
        first request would wait for.

        Raises:
            PeerLost: Another rank is gone.
        """
        number = torch.zeros(1, dtype=torch.int64, device=device)
        if not self.is_first:
            self.receive_stream(torch.empty_like(number)).wait()
        if not self.is_last:
            self.send_stream(number)
        if self.is_last:
            self.send_tokens(number)
        if self.is_first:
            self.receive_tokens(torch.empty_like(number)).wait()

    def send_stream(self, stream: Tensor) -> None:
        """Begins to send a step's residual stream to the next stage; nobody changes it any more.

        Raises:
            PeerLost: Another rank is gone.
        """
        self._send(stream, self._streams, self._stage + 1)

    def receive_stream(self, out: Tensor) -> Receipt:
        """Begins to fill `out` with the next stream of the stage before, of the same shape.

        Raises:
            PeerLost: Another rank is gone.
        """
        return self._receive(out, self._streams, self._stage - 1)

    def send_tokens(self, tokens: Tensor) -> None:
        """Begins to send the tokens that a step drew, int64 [num_samples], to the first stage.

        Raises:
            PeerLost: Another rank is gone.
        """
        assert self._tokens is not None, "tokens are drawn by the last stage"
        self._send(tokens, self._tokens, 0)

    def receive_tokens(self, out: Tensor) -> Receipt:
        """Begins to fill `out`, int64 [num_samples], with the next tokens of the last stage.

        Raises:
            PeerLost: Another rank is gone.
        """
        assert self._tokens is not None, "tokens go to the first stage"
        return self._receive(out, self._tokens, 1)

    def _send(self, tensor: Tensor, group: dist.ProcessGroup, target: int) -> None:
        under_way = self._under_way.setdefault(group, deque())
        with self._named_losses():
            work = dist.isend(tensor, group=group, group_dst=target)
            assert work is not None, "this process is a rank of the group"
            under_way.append((work, tensor))
            if len(under_way) > MOST_UNDER_WAY:
                under_way.popleft()[0].wait()

    def _receive(self, out: Tensor, group: dist.ProcessGroup, source: int) -> Receipt:
        with self._named_losses():
            work = dist.irecv(out, group=group, group_src=source)
        assert work is not None, "this process is a rank of the group"
        return Receipt(work, out, self)

    def wait(self, work: dist.Work) -> None:
        """Waits for what is being received.

        Raises:
            PeerLost: Another rank is gone.
        """
        self._on_enter()
        with self._named_losses():
            work.wait()


class Receipt:
    """What is being received."""

    def __init__(self, work: dist.Work, out: Tensor, links: StageLinks) -> None:
        self._work, self._out, self._links = work, out, links

    def wait(self) -> Tensor:
        """The tensor, for whatever this rank computes from now on.

        Raises:
            PeerLost: Another rank is gone.
        """
        self._links.wait(self._work)
        return self._out
