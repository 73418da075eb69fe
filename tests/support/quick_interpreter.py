"""Makes Triton's interpreter two to four times as fast, without changing what it computes.

Most of its time goes into work that is repeated and whose result is known: the language is patched
anew for every call of a device function, and each tensor builds its shape and its types again. What
is replaced here are five of its functions by ones that remember; `REPLACED` names them. Triton's
version is locked: another one may need another file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Each function that was replaced: its owner, its name and what it was.
REPLACED: list[tuple[Any, str, Any]] = []


def install(interpreter: ModuleType) -> None:
    """Replaces what is slow.

    Args:
        interpreter: The imported module `triton.runtime.interpreter`.
    """
    core = interpreter.tl.core
    _replace(interpreter, "_patch_lang", _patching_once(interpreter))
    _replace(interpreter, "_get_np_dtype", _remembered_dtypes(interpreter))
    _replace(core, "_type_for_tuple_values", _remembered_tuple_types(core))
    _replace(core.tensor, "__init__", _tensor_with_remembered_shape(core))
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
