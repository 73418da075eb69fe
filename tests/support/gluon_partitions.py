"""Runs a Gluon kernel whose warps have different trades without a card.

Each partition of a program is a thread, and barriers are what a card's are: arrivals and bytes that
are still expected, and a phase. As in `gluon_emulation`, nothing is done before the kernel has
waited for it: what the copy engine brings lands when a wait for its barrier passes, and products
read shared memory when a wait demands their result. With `eager` copies land at once, which shows
places that are filled while something still reads them. A kernel that would hang fails.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from tests.support.gluon_emulation import Descriptor, Pointer, Shared, Value, argument, language, speaking, value

from headrace_kernels.attention.prefill_sm90 import items, results
from headrace_kernels.hopper import ring

# Modules whose functions kernels call.
_SHARED_ROOMS = (ring, items, results)

# A card's longest wait in these kernels is some microseconds; a thread's is other threads' work.
_HANGS_S = 60.0


class _Barrier:
    """Arrivals and bytes that the phase under way still waits for, and phases that are over."""

    def __init__(self, count: int) -> None:
        self.count, self.arrivals, self.num_bytes, self.phases = count, 0, 0, 0
        self.copies: list[Callable[[], object]] = []
        self.landing: list[Callable[[], object]] = []

    def end_phase(self) -> None:
        if self.arrivals == self.count and self.num_bytes == 0:
            self.arrivals, self.phases = 0, self.phases + 1
            self.landing, self.copies = self.landing + self.copies, []


class _Partition(threading.local):
    """Products and copies that a group of warps has under way."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []
        self.products: list[Callable[[], object]] = []


class Program:
    """One program: its barriers and its partitions."""

    def __init__(self, place: int, num_programs: int, eager: bool) -> None:
        self._place, self._num_programs, self._eager = place, num_programs, eager
        self._changed = threading.Condition()
        self._barriers: dict[int, _Barrier] = {}
        self._partition = _Partition()
        self._failures: list[BaseException] = []
        self.MBarrierLayout = lambda: None

    def names(self) -> types.SimpleNamespace:
        """The language as this program speaks it."""
        known = language(lambda axis: value(self._place), 4)
        known.num_programs = lambda axis: value(self._num_programs)
        known.warp_specialize = self._specialize
        known.atomic_add = self._atomic_add
        return known

    def _specialize(
        self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: object, registers: object
    ) -> None:
        threads = [threading.Thread(target=self._run, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, part: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            part(*arguments)
            assert not self._partition.products and not self._partition.copies, "something is under way at the end"
        except BaseException as failure:
            with self._changed:
                self._failures.append(failure)
                self._changed.notify_all()

    # Barriers and copies, by their names in the language.
    def init(self, barrier: Shared, count: int) -> None:
        self._barriers[barrier.numbers.data_ptr()] = _Barrier(count)

    def expect(self, barrier: Shared, num_bytes: int) -> None:
        self._change(barrier, 1, num_bytes)

    def arrive(self, barrier: Shared, count: int) -> None:
        self._change(barrier, count, 0)

    def async_copy_global_to_shared(self, source: Descriptor, places: list[Any], barrier: Shared, smem: Shared) -> None:
        tile = source.read(*map(int, places))
        assert tile.shape == smem.numbers.shape
        with self._changed:
            # Whoever still reads what was there before reads nonsense.
            smem.numbers.copy_(tile if self._eager else torch.full_like(tile, float("nan")))
            self._barriers[barrier.numbers.data_ptr()].copies.append(lambda: smem.numbers.copy_(tile))
        self._change(barrier, 0, -tile.nbytes)

    def _change(self, barrier: Shared, arrivals: int, num_bytes: int) -> None:
        with self._changed:
            found = self._barriers[barrier.numbers.data_ptr()]
            found.arrivals += arrivals
            found.num_bytes += num_bytes
            assert found.arrivals <= found.count, "more arrivals than a phase has"
            found.end_phase()
            self._changed.notify_all()

    def wait(self, barrier: Shared, phase: Any) -> None:
        found = self._barriers[barrier.numbers.data_ptr()]

        def over() -> bool:
            return bool(self._failures) or found.phases % 2 != int(phase) % 2

        with self._changed:
            assert self._changed.wait_for(over, _HANGS_S), "a card would wait for ever"
            assert not self._failures, "another partition failed"
            landing, found.landing = found.landing, []
            for land in landing:
                land()

    # Copies that warps do themselves.
    def copy(self, smem: Shared, pointer: Pointer, mask: torch.Tensor) -> None:
        wanted = mask.expand(smem.numbers.shape).as_subclass(torch.Tensor)
        places = torch.where(wanted, pointer.places.as_subclass(torch.Tensor), 0)
        lines = torch.where(wanted, Pointer(pointer.tensor, places).read().as_subclass(torch.Tensor), 0)
        smem.numbers.copy_(lines if self._eager else torch.full_like(lines, float("nan")))
        self._partition.copies.append(lambda: smem.numbers.copy_(lines))

    def commit_group(self) -> None:
        """Waits here are for all groups."""

    def wait_group(self, num_under_way: int) -> None:
        assert num_under_way == 0
        while self._partition.copies:
            self._partition.copies.pop(0)()

    def _atomic_add(self, pointer: Pointer, more: int, sem: str, scope: str) -> Value:
        assert (sem, scope) == ("acq_rel", "gpu"), "what was stored before is to be seen by whoever is last"
        with self._changed:
            before = pointer.read().clone()
            pointer.tensor[int(pointer.places)] += more
        return before

    # Products.
    def fence_async_shared(self) -> None:
        """Nothing is out of order here."""

    def warpgroup_mma(self, left: Any, right: Shared, total: Value, is_async: bool, use_acc: bool = True) -> Value:
        def multiply() -> None:
            numbers = left.read() if isinstance(left, Shared) else left
            total.mul_(use_acc).add_(numbers.float() @ right.read().float())

        assert is_async
        self._partition.products.append(multiply)
        return total

    def warpgroup_mma_wait(self, num_under_way: int, deps: list[Any]) -> Any:
        while len(self._partition.products) > num_under_way:
            self._partition.products.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)


@contextlib.contextmanager
def emulating_partitions(module: Any, kernel: str, eager: bool) -> Iterator[list[int]]:
    """Inside, `module.<kernel>[grid](...)` runs here; yields how many programs each launch has."""
    plain = getattr(module, kernel).fn
    launches: list[int] = []

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, num_warps: int, **constants: Any) -> None:
                launches.append(grid[0])
                for place in range(grid[0]):
                    program = Program(place, grid[0], eager)
                    names = {
                        "mbarrier": program,
                        "tma": program,
                        "async_copy": types.SimpleNamespace(
                            async_copy_global_to_shared=program.copy,
                            commit_group=program.commit_group,
                            wait_group=program.wait_group,
                        ),
                        "fence_async_shared": program.fence_async_shared,
                        "warpgroup_mma": program.warpgroup_mma,
                        "warpgroup_mma_wait": program.warpgroup_mma_wait,
                    }
                    with speaking((module, *_SHARED_ROOMS), program.names(), names):
                        plain(*map(argument, args), **constants)

            return launch

    with mock.patch.object(module, kernel, Launcher()):
        yield launches
