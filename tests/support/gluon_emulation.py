"""Runs a Gluon kernel of quantized weights without a card, one program after the other.

Tensors are whole arrays of numbers.

What it proves is what the kernel says, not what the compiler makes of it: places in memory, slots,
and the order of copies, products and waits. Copies land when a wait demands their group, and
products read shared memory at once, so that a wait too few gives wrong numbers. With `eager` it is
the other way round: copies land at once, and products read shared memory when a wait demands their
result, which shows slots that are filled while something still reads them. The copy engine's copies
land when the barrier that they arrive at is waited for, and a wait for what nobody copies, or for
another number of bytes, fails where a card would hang. So does a program that ends while copies or
products are under way.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace_kernels.experts import grouped_work_sm90, mxfp4_step_sm90
from headrace_kernels.hopper import ring, row_streams, stream_k
from headrace_kernels.linear.few_bits import block_sums, operands
from headrace_kernels.weight_formats import mxfp4_operands


class Kind:
    """A type of the kernel's language."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth, self.value = dtype, dtype.itemsize * 8, self


_KINDS = {
    dtype: Kind(dtype)
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
    )
}


class Value(torch.Tensor):
    """A tensor of the kernel."""

    @property
    def layout(self) -> None:  # type: ignore[override]
        return None

    @property
    def type(self) -> types.SimpleNamespace:  # type: ignore[override]
        return types.SimpleNamespace(layout=None)

    def to(self, kind: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        dtype = kind.dtype if isinstance(kind, Kind) else kind
        return self.view(dtype) if bitcast else super().to(dtype)


def value(tensor: Any) -> Value:
    return torch.as_tensor(tensor).as_subclass(Value)


class Pointer:
    """Places in a tensor's memory, which begins with its first number and ends with its last."""

    def __init__(self, tensor: Tensor, places: Any = 0) -> None:
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        length = min(1, tensor.numel()) * (1 + sum((size - 1) * stride for size, stride in strides))
        self.tensor, self.places = tensor.as_strided((length,), (1,)), places
        self.dtype = types.SimpleNamespace(element_ty=_KINDS[tensor.dtype])

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.places + more)

    def read(self) -> Value:
        places = torch.as_tensor(self.places).as_subclass(Tensor).long()
        assert 0 <= int(places.min()) and int(places.max()) < self.tensor.numel()
        return value(self.tensor[places])


class Shared:
    """Shared memory, full of NaN, or of bytes that stand for nothing, to begin with."""

    def __init__(self, numbers: Tensor, transposed: bool = False) -> None:
        self.numbers, self.transposed = numbers, transposed

    def index(self, place: Any) -> Shared:
        return Shared(self.numbers[int(place)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.numbers.narrow(dim, start, length))

    def permute(self, order: tuple[int, int]) -> Shared:
        assert order == (1, 0)
        return Shared(self.numbers, True)

    @property
    def dtype(self) -> Kind:
        return _KINDS[self.numbers.dtype]

    def load(self, layout: object) -> Value:
        return value(self.read().clone())

    def store(self, numbers: Tensor) -> None:
        self.numbers.copy_(numbers)

    def _reinterpret(self, kind: Kind, shape: list[int], layout: object) -> Shared:
        assert kind.dtype == self.numbers.dtype
        return Shared(self.numbers.view(shape))

    def read(self) -> Tensor:
        return self.numbers.t() if self.transposed else self.numbers


class Descriptor:
    """What the copy engine reads boxes of a tensor from."""

    def __init__(self, described: Any) -> None:
        base, self.block_shape = described.base, tuple(described.block_shape)
        self.tensor = base.as_strided(tuple(described.shape), tuple(described.strides))
        self.dtype, self.layout = _KINDS[base.dtype], described.layout

    def read(self, *corner: int) -> Tensor:
        """A box; 0 beyond the end."""
        found = torch.zeros(self.block_shape, dtype=self.tensor.dtype)
        part = self.tensor[tuple(map(slice, corner, map(sum, zip(corner, self.block_shape, strict=True))))]
        found[tuple(map(slice, part.shape))] = part
        return found


class _Barriers:
    """The barriers of a program at which the copy engine's tiles arrive.

    They are known by their places in shared memory; functions have their names in the language.
    """

    def __init__(self, program: _Program) -> None:
        self._program = program
        # Of each: copies that are under way, bytes that are still to be copied, phases that are
        # over.
        self._copies: dict[int, list[Callable[[], object]]] = {}
        self._bytes: dict[int, int] = {}
        self._phases: dict[int, int] = {}
        self.MBarrierLayout = lambda: None

    def init(self, barrier: Shared, count: int) -> None:
        assert count == 1
        place = barrier.numbers.data_ptr()
        self._copies[place], self._bytes[place], self._phases[place] = [], 0, 0

    def expect(self, barrier: Shared, num_bytes: int, pred: Any = True) -> None:
        if not pred:
            return
        place = barrier.numbers.data_ptr()
        assert not self._copies[place] and self._bytes[place] == 0, "a slot is filled that was not waited for"
        self._bytes[place] = num_bytes

    def async_copy_global_to_shared(
        self, source: Descriptor, places: list[Any], barrier: Shared, smem: Shared, pred: Any = True
    ) -> None:
        if not pred:
            return
        tile = source.read(*map(int, places))
        assert tile.shape == smem.numbers.shape
        place = barrier.numbers.data_ptr()
        self._bytes[place] -= tile.nbytes

        def land() -> None:
            smem.numbers.copy_(tile)

        if self._program.eager:
            land()
        self._copies[place].append(land)

    def wait(self, barrier: Shared, phase: Any) -> None:
        place = barrier.numbers.data_ptr()
        assert self._copies[place] and self._bytes[place] == 0, "a card would wait for ever"
        assert self._phases[place] % 2 == int(phase), "a card would wait for another phase"
        self._phases[place] += 1
        landed, self._copies[place] = self._copies[place], []
        if self._program.careless != "copies":
            for land in landed:
                land()

    def are_done(self) -> bool:
        """Whether nothing is under way."""
        return not any(self._copies.values())


class _Program:
    """What one program has under way."""

    def __init__(self, ids: tuple[int, ...], grid: tuple[int, ...], eager: bool, careless: str | None) -> None:
        self.ids, self.grid, self.eager, self.careless = ids, grid, eager, careless
        self.copies: list[Callable[[], object]] = []
        self.groups: list[list[Callable[[], object]]] = []
        self.products: list[Callable[[], object]] = []
        self.mbarrier = self.tma = _Barriers(self)
        self.async_copy = self

    def end(self) -> None:
        """Asserts that the program has waited for all that it began."""
        is_done = self.mbarrier.are_done() and not any((self.copies, *self.groups, self.products))
        assert is_done or self.careless, "something is under way at the end"

    # The functions of the language, by their names there.
    def program_id(self, axis: int) -> Value:
        return value(self.ids[axis])

    def num_programs(self, axis: int) -> Value:
        return value(self.grid[axis])

    def async_copy_global_to_shared(self, smem: Shared, pointer: Pointer, mask: Tensor | None = None) -> None:
        places, copied = pointer.places, torch.ones(smem.numbers.shape, dtype=torch.bool)
        if mask is not None:
            copied &= mask.as_subclass(Tensor)
            if not bool(copied.any()):
                return
            places = torch.where(copied, torch.as_tensor(places).as_subclass(Tensor), 0)
        read = Pointer(pointer.tensor, places).read().as_subclass(Tensor)
        assert read.shape == smem.numbers.shape

        def land() -> None:
            smem.numbers.copy_(torch.where(copied, read, smem.numbers))

        if self.eager:
            land()
        else:
            self.copies.append(land)

    def commit_group(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, num_under_way: int) -> None:
        is_careless = self.careless in ("copies", "copies of threads")
        while len(self.groups) > num_under_way + (is_careless and num_under_way > 0):
            for copy in self.groups.pop(0):
                copy()

    def fence_async_shared(self) -> None:
        """Nothing is out of order here."""

    def warpgroup_mma(
        self, left: Tensor | Shared, right: Shared, total: Tensor, is_async: bool, use_acc: bool = True
    ) -> Tensor:
        def multiply() -> None:
            numbers = left.read() if isinstance(left, Shared) else left
            total.mul_(use_acc).add_(numbers.float() @ right.read().float())

        assert is_async
        self.products.append(multiply)
        if not self.eager:
            self.warpgroup_mma_wait(0, [total])
        return total

    def mma_v2(self, left: Tensor, right: Tensor, total: Tensor) -> Value:
        return value(total + left.float() @ right.float())

    def warpgroup_mma_wait(self, num_under_way: int, deps: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
        while len(self.products) > num_under_way + (self.careless == "products" and num_under_way > 0):
            self.products.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)


def _allocate(kind: Kind, shape: list[int], layout: object) -> Shared:
    if kind.dtype.is_floating_point:
        return Shared(torch.full(shape, float("nan"), dtype=kind.dtype))
    return Shared(torch.randint(0, 100, shape).to(kind.dtype))


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0, cache_modifier: str = "") -> Value:
    if mask is None:
        return pointer.read()
    places = torch.as_tensor(pointer.places).as_subclass(Tensor)
    mask = mask.expand(torch.broadcast_shapes(mask.shape, places.shape)).as_subclass(Tensor)
    numbers = Pointer(pointer.tensor, torch.where(mask, places, 0)).read()
    return value(torch.where(mask, numbers.as_subclass(Tensor), other))


def _store(pointer: Pointer, numbers: Any, mask: Tensor | None = None) -> None:
    numbers = torch.as_tensor(numbers, dtype=pointer.tensor.dtype)
    if mask is None:
        pointer.tensor[torch.as_tensor(pointer.places).as_subclass(Tensor).long()] = numbers.as_subclass(Tensor)
        return
    mask = mask.expand(numbers.shape).as_subclass(Tensor)
    pointer.tensor[pointer.places.as_subclass(Tensor).long()[mask]] = numbers.as_subclass(Tensor)[mask]


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Tensor) and condition.ndim:
        return value(torch.where(condition, a, b))
    return a if condition else b


# Modules whose functions kernels call.
_SHARED_ROOMS = (
    ring, row_streams, stream_k, operands, block_sums, grouped_work_sm90, mxfp4_step_sm90, mxfp4_operands,
)  # fmt: skip
# What kernels import by name that a program does.
_OF_A_PROGRAM = {"warpgroup_mma", "warpgroup_mma_wait", "mma_v2", "fence_async_shared", "mbarrier", "tma", "async_copy"}


def argument(given: Any) -> Any:
    """Returns a kernel's argument as the kernel sees it."""
    if isinstance(given, Tensor):
        return Pointer(given)
    return Descriptor(given) if isinstance(given, TensorDescriptor) else given


def language(program_id: Callable[[int], Value], num_warps: int) -> types.SimpleNamespace:
    kinds = {str(dtype).removeprefix("torch."): kind for dtype, kind in _KINDS.items()}
    kinds["float8e4nv"] = kinds["float8_e4m3fn"]

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    return types.SimpleNamespace(
        **kinds,
        constexpr=object,
        num_warps=lambda: num_warps,
        NVMMADistributedLayout=nothing,
        DotOperandLayout=nothing,
        BlockedLayout=nothing,
        NVMMASharedLayout=nothing,
        SwizzledSharedLayout=nothing,
        DistributedLinearLayout=nothing,
        SliceLayout=nothing,
        thread_barrier=nothing,
        static_range=range,
        program_id=program_id,
        allocate_shared_memory=_allocate,
        arange=lambda first, end, layout: value(torch.arange(first, end)),
        zeros=lambda shape, kind, layout: value(torch.zeros(shape, dtype=kind.dtype)),
        full=lambda shape, number, kind, layout: value(torch.full(shape, number, dtype=kind.dtype)),
        minimum=lambda a, b: value(torch.minimum(torch.as_tensor(a), torch.as_tensor(b))),
        maximum=lambda a, b: value(torch.maximum(torch.as_tensor(a), torch.as_tensor(b))),
        where=_where,
        sum=lambda x, axis: value(x.sum(axis)),
        max=lambda x, axis: value(x.amax(axis)),
        expand_dims=lambda x, dim: x.unsqueeze(dim),
        split=lambda x: x.unbind(-1),
        join=lambda a, b: value(torch.stack((a, b), -1)),
        div_rn=lambda a, b: a / b,
        convert_layout=lambda x, layout: x,
        exp=torch.exp,
        exp2=torch.exp2,
        log2=torch.log2,
        rsqrt=torch.rsqrt,
        load=_load,
        store=_store,
    )


def launch_control(source: str, operands: list[Tensor], kind: object) -> Tensor:
    """What early launches say, which stand for nothing here: kernels without other assembly."""
    assert source.startswith("griddepcontrol") and not operands
    return torch.zeros(1)


@contextlib.contextmanager
def speaking(modules: Iterable[Any], gl: types.SimpleNamespace, names: dict[str, Any]) -> Iterator[None]:
    """Inside, the modules' Gluon functions are plain ones that speak a program's language.

    Args:
        modules: Modules of a kernel, and `hopper`'s, of which it has functions.
        gl: The language.
        names: What a program does, by the names under which modules import it.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            plain = {name: value.fn for name, value in vars(module).items() if hasattr(value, "fn")}
            found = {name: value for name, value in names.items() if name in vars(module)}
            stack.enter_context(mock.patch.multiple(module, gl=gl, **plain, **found))
        yield


@contextlib.contextmanager
def emulating(
    module: Any, kernel: Any, assembly: Callable[..., Tensor], eager: bool, careless: str | None = None
) -> Iterator[None]:
    """Inside, `module.<kernel>[grid](...)` runs here.

    `assembly(source, operands, kind)` stands for inline assembly.

    Args:
        module: Module of the kernel.
        kernel: Name of the kernel in the module.
        assembly: What a piece of assembly makes of its operands.
        eager: Copies land at once, and products are done when a wait demands it.
        careless: "copies", "copies of threads" or "products": one of them more than the kernel
            allows is left under way at its waits.
    """
    plain = getattr(module, kernel).fn

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(
                *args: Any, num_warps: int, maxnreg: int | None, launch_pdl: bool = False, **constants: Any
            ) -> None:
                self._run(grid, args, num_warps, constants)

            return launch

        def _run(self, grid: tuple[int, ...], args: tuple[Any, ...], num_warps: int, constants: dict[str, Any]) -> None:
            values = [argument(arg) for arg in args]
            for ids in itertools.product(*map(range, grid)):
                program = _Program(ids, grid, eager, careless)
                names_of_language = language(program.program_id, num_warps)
                names_of_language.num_programs = program.num_programs
                names_of_language.inline_asm_elementwise = lambda source, constraints, operands, dtype, is_pure, pack: (
                    value(assembly(source, operands, dtype))
                )
                names = {name: getattr(program, name) for name in _OF_A_PROGRAM}
                with speaking((module, *_SHARED_ROOMS), names_of_language, names):
                    plain(*values, **constants)
                program.end()

    with mock.patch.object(module, kernel, Launcher()):
        yield
