"""Makes Triton's interpreter several times as fast, without changing what it computes.

Most of its time goes into work that is repeated and whose result is known: the language is patched
anew for every call of a device function, each tensor builds its shape and its types again, and each
sum compares the shapes of two tensors of one type. What is replaced here are twelve of its
functions, by ones that remember or that leave a whole array to NumPy; `REPLACED` names them.
Triton's version is locked: another one may need another file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

# Each function that was replaced: its owner, its name and what it was.
REPLACED: list[tuple[Any, str, Any]] = []


def install(interpreter: ModuleType) -> None:
    """Replaces what is slow.

    Args:
        interpreter: The imported module `triton.runtime.interpreter`.
    """
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    _replace(interpreter, "_patch_lang", _patching_once(interpreter))
    _replace(interpreter, "_get_np_dtype", _remembered_dtypes(interpreter))
    _replace(core, "_type_for_tuple_values", _remembered_tuple_types(core))
    _replace(core.tensor, "__init__", _tensor_with_remembered_shape(core))
    _replace(core.block_type, "__init__", _block_with_remembered_shape(core))
    _replace(core, "_unwrap_if_constexpr", _unwrapped_by_type(core))
    _replace(semantic, "broadcast_impl_value", _broadcast_where_shapes_differ(core, semantic))
    _replace(semantic, "binary_op_type_checking_impl", _checked_where_types_differ(core, semantic))
    _replace(semantic, "computation_type_impl", _remembered_computation_types(semantic))
    _replace(interpreter, "_patch_attr", _patching_without_filter(interpreter))
    _replace(interpreter.ReduceOps, "apply_impl", _bits_reduced_at_once(interpreter))
    # Compared with 64 bits after every sum and product, and then forgotten: only `debug` would look
    # at what came out.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    _replace(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


def _replace(owner: Any, name: str, quick: Any) -> None:
    REPLACED.append((owner, name, getattr(owner, name)))
    setattr(owner, name, quick)


def _patching_once(interpreter: ModuleType) -> Callable[[Any], Any]:
    """Within a launch, modules of the language that are patched already are not patched again."""
    plain, language = interpreter._patch_lang, interpreter.tl
    patched: set[str] = set()

    class Scope:
        """Ends with the launch."""

        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            patched.clear()
            self._scope.restore()

    @functools.cache
    def modules(function: Any) -> frozenset[str]:
        seen = {id(value) for value in function.__globals__.values()}
        return frozenset(module.__name__ for module in (language, language.core) if id(module) in seen)

    def patch(function: Any) -> Scope | None:
        missing = modules(function) - patched
        if patched and not missing:
            return None
        patched.update(missing)
        return Scope(plain(function))

    return patch


def _remembered_dtypes(interpreter: ModuleType) -> Callable[[Any], Any]:
    plain, language = functools.cache(interpreter._get_np_dtype), interpreter.tl

    def dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        # Any address is of 64 bits; types of pointers have no hash.
        return plain(language.uint64 if isinstance(element, language.pointer_type) else element)

    return dtype


def _remembered_tuple_types(core: Any) -> Callable[..., Any]:
    """Types of tuples of whole numbers, which shapes are."""
    plain = core._type_for_tuple_values

    @functools.cache
    def of_integers(values: tuple[int, ...], constexpr: tuple[bool, ...]) -> Any:
        return plain([core.constexpr(v) if c else v for v, c in zip(values, constexpr, strict=True)])

    def type_of(values: Sequence[Any], fields: Any = None) -> Any:
        wrapped = tuple([type(value) is core.constexpr for value in values])
        bare = tuple([v.value if w else v for v, w in zip(values, wrapped, strict=True)])
        if fields is None and all(type(value) is int for value in bare):
            return of_integers(bare, wrapped)
        return plain(values, fields)

    return type_of


def _tensor_with_remembered_shape(core: Any) -> Callable[[Any, Any, Any], None]:
    @functools.cache
    def shape_and_size(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shape_and_size(tuple(kind.shape) if kind.is_block() else ())

    return init


def _block_with_remembered_shape(core: Any) -> Callable[..., None]:
    """Blocks of the same sizes share their shape, which is checked and written as text once."""
    plain, constexpr = core.block_type.__init__, core.constexpr
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is constexpr else size for size in shape])
        if sizes not in known:
            plain(self, element_ty, shape)
            if all(type(size) is int for size in sizes):
                known[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    return init


def _unwrapped_by_type(core: Any) -> Callable[[Any], Any]:
    """Most values are numbers and tensors, in which there is nothing to look for."""
    plain, constexpr, sequences = core._unwrap_if_constexpr, core.constexpr, (list, tuple, core.tuple)

    def unwrap(value: Any) -> Any:
        if isinstance(value, constexpr):
            return value.value
        return plain(value) if isinstance(value, sequences) else value

    return unwrap


def _broadcast_where_shapes_differ(core: Any, semantic: Any) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Two numbers, and blocks that share their shape, stay as they are."""
    plain, block = semantic.broadcast_impl_value, core.block_type

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        # Blocks of other types are Gluon's, whose layouts are compared too.
        if type(left) is block:
            same = type(right) is block and left.shape is right.shape
        else:
            same = not left.is_block() and not right.is_block()
        return (lhs, rhs) if same else plain(self, lhs, rhs)

    return broadcast


def _checked_where_types_differ(core: Any, semantic: Any) -> Callable[..., tuple[Any, Any]]:
    """Two tensors of one type are neither converted nor refused, but for quotients of 16 bits."""
    plain, tensor, number = semantic.binary_op_type_checking_impl, core.tensor, core.dtype

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if type(lhs) is tensor and type(rhs) is tensor and not div_or_mod:
            kind = lhs.dtype
            if kind is rhs.dtype and type(kind) is number:
                return self.broadcast_impl_value(lhs, rhs)
        return plain(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return check


def _remembered_computation_types(semantic: Any) -> Callable[..., Any]:
    plain = semantic.computation_type_impl
    known: dict[tuple[Any, ...], Any] = {}

    def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = plain(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return computation_type


def _patching_without_filter(interpreter: ModuleType) -> Callable[..., None]:
    """Functions of the language find their semantic among the arguments that they are given."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch


def _bits_reduced_at_once(interpreter: ModuleType) -> Callable[[Any, Any], Any]:
    """Exclusive ors, of which a sort has one for each of its steps, are not computed one by one."""
    plain, xor = interpreter.ReduceOps.apply_impl, interpreter.tl.standard._xor_combine

    def apply(self: Any, input: Any) -> Any:
        if self.combine_fn is not xor:
            return plain(self, input)
        bits = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(bits, input[0].dtype)

    return apply
