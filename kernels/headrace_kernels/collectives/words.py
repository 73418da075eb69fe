"""Vectors of 16 bytes that go from GPU to GPU without a flag.

A vector is four words of 32 bits, each of which is its own flag.

Owns the *sentinel*, the word that stands where nothing has come yet, all of whose bits are set: as
fp32 one NaN of many, as two numbers of 16 bits two NaNs of many. Words that are sent are never
the sentinel, for a NaN is as good as another (`load_vectors`). So no number, zero of either sign or
infinity is changed, and no bit pattern can be waited for in vain.

A vector may arrive in pieces, but no word does, which is why all four words are looked at. Stores
and looks are assembly, which the compiler can neither leave out nor move across each other: one
store of 16 bytes, and a loop of each thread by itself with the vectors of all ranks under way at
once. In Triton's interpreter plain loads and stores take its place.
"""

# Triton's decorator has no types, and a kernel's arguments differ here and in the compiler.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.triton_runtime import INTERPRETED

SENTINEL = -1
SENTINEL_BYTES = 4
# Two NaNs of 16 bits, or one of 32.
_NAN = tl.constexpr(0x7FFF7FFF)
_SENTINEL = tl.constexpr(SENTINEL)
_PLAIN = tl.constexpr(INTERPRETED)
_WORDS = 4
# The result is nothing: assembly must have one.
_SEND = tl.constexpr(
    "{ .reg .pred p; setp.ne.s64 p, $1, 0; @p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)


@triton.jit
def _sendable(words):
    """Words as they are sent, none of them the sentinel."""
    return tl.where(words == _SENTINEL, _NAN, words)


@triton.jit
def load_vectors(numbers, vectors, mask):
    """Sendable words of the vectors at `numbers`, a multiple of 16 bytes.

    Returns four tensors, of one word of each vector.

    Zeros where the mask is not set.
    """
    offs = vectors[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = numbers.to(tl.pointer_type(tl.int32))
    found = _sendable(tl.load(words + offs, mask=mask[:, None], other=0))
    return _apart(found)


@triton.jit
def store_vectors(numbers, vectors, words, mask):
    """Stores the vectors' four words at `numbers`, a multiple of 16 bytes of this card's memory."""
    offs = vectors[:, None] * 4 + tl.arange(0, 4)[None, :]
    places = numbers.to(tl.pointer_type(tl.int32))
    tl.store(places + offs, _side_by_side(words[0], words[1], words[2], words[3]), mask=mask[:, None])


@triton.jit
def _side_by_side(w0, w1, w2, w3):
    """[vectors, 4]."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (w0.shape[0], 4))


@triton.jit
def _apart(words):
    """The four columns of [vectors, 4]."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def words_of(numbers):
    """Sendable words of vectors' numbers [vectors, 4 or 8] in their type."""
    if numbers.dtype == tl.float32:
        words = numbers.to(tl.int32, bitcast=True)
    else:
        pairs = tl.reshape(numbers.to(tl.int16, bitcast=True).to(tl.int32), (numbers.shape[0], 4, 2))
        low, high = tl.split(pairs)
        words = (low & 0xFFFF) | (high << 16)
    return _apart(_sendable(words))


@triton.jit
def numbers_of(w0, w1, w2, w3, TYPE: tl.constexpr):
    """The vectors' numbers, fp32 [vectors, 4 or 8], of words of TYPE."""
    words = _side_by_side(w0, w1, w2, w3)
    if TYPE == tl.float32:
        numbers = words.to(tl.float32, bitcast=True)
    elif TYPE == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
        numbers = tl.reshape(tl.join(low, high), (w0.shape[0], 8))
    else:
        low = words.to(tl.int16).to(TYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(TYPE, bitcast=True)
        numbers = tl.reshape(tl.join(low, high), (w0.shape[0], 8)).to(tl.float32)
    return numbers


@triton.constexpr_function
def _await_assembly(world_size, slot_bytes):
    """Loads one vector of each rank's slot, again as long as a word of it is the sentinel.

    This rank's own words are given.

    All that are looked at are under way at once.
    """
    outputs = _WORDS * world_size
    address, rank, own = outputs, outputs + 1, outputs + 2
    lines = [f"{{ .reg .pred p<{world_size}>, q; .reg .b32 most; setp.ne.s64 q, ${address}, 0;"]
    for slot in range(world_size):
        lines.append(f"setp.ne.and.s32 p{slot}, ${rank}, {slot}, q;")
        lines += [f"mov.b32 ${_WORDS * slot + word}, ${own + word};" for word in range(_WORDS)]
    lines.append("look:")
    for slot in range(world_size):
        words = ", ".join(f"${_WORDS * slot + word}" for word in range(_WORDS))
        lines.append(f"@p{slot} ld.relaxed.sys.global.v4.b32 {{{words}}}, [${address} + {slot * slot_bytes}];")
    lines.append("setp.ne.b32 q, 0, 0;")
    for slot in range(world_size):
        # The greatest of unsigned words is the sentinel if any is.
        w0, w1, w2, w3 = (f"${_WORDS * slot + word}" for word in range(_WORDS))
        lines.append(f"max.u32 most, {w0}, {w1}; max.u32 most, most, {w2}; max.u32 most, most, {w3};")
        lines.append(f"setp.eq.and.u32 p{slot}, most, 0xFFFFFFFF, p{slot}; or.pred q, q, p{slot};")
    lines.append("@q bra look; }")
    return " ".join(lines)


@triton.constexpr_function
def _await_constraints(world_size):
    # Outputs are written while inputs are still needed.
    return ",".join(["=&r"] * (_WORDS * world_size) + ["l", "r"] + ["r"] * _WORDS)


@triton.constexpr_function
def _await_types(world_size):
    return (tl.int32,) * (_WORDS * world_size)


@triton.jit
def reset_vectors(address, vectors, mask):
    """Resets vectors at `address` to the sentinel, in this GPU's memory."""
    offs = vectors[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    tl.store(words + offs, tl.full((vectors.shape[0], 4), _SENTINEL, tl.int32), mask=mask[:, None])


@triton.jit
def send_vectors(address, vectors, words, mask):
    """Stores words at `address` (int64, of any GPU's memory), by vectors, each once.

    There must be as many vectors as threads or more.
    """
    places = address + vectors.to(tl.int64) * 16
    if _PLAIN:
        for word in tl.static_range(4):
            tl.store(places.to(tl.pointer_type(tl.int32)) + word, words[word], mask=mask)
    else:
        # Address 0: nothing is stored.
        places = tl.where(mask, places, 0)
        tl.inline_asm_elementwise(
            _SEND,
            "=r,l,r,r,r,r",
            [places, words[0], words[1], words[2], words[3]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def await_vectors(address, vectors, mask, rank, own, SLOT_BYTES: tl.constexpr, WORLD: tl.constexpr):
    """Waits for vectors in all slots, SLOT_BYTES apart from `address` on.

    Gives four words for each rank, in their order; in place of this rank's slot, which is not
    looked at, stand the words `own`.
    """
    places = tl.where(mask, address + vectors.to(tl.int64) * 16, 0)
    if _PLAIN:
        found = ()
        for slot in tl.static_range(WORLD):
            words = (places + slot * SLOT_BYTES).to(tl.pointer_type(tl.int32))
            found = found + _await_slot(words, mask & (rank != slot), own)
    else:
        assembly: tl.constexpr = _await_assembly(WORLD, SLOT_BYTES)
        constraints: tl.constexpr = _await_constraints(WORLD)
        types: tl.constexpr = _await_types(WORLD)
        found = tl.inline_asm_elementwise(
            assembly, constraints, [places, rank, own[0], own[1], own[2], own[3]], dtype=types, is_pure=False, pack=1
        )
    return found


@triton.jit
def _await_slot(words, mask, own):
    found = _look(words, mask, own)
    while _is_sentinel(found):
        found = _look(words, mask, own)
    return found


@triton.jit
def _look(words, mask, own):
    w0 = tl.load(words, mask=mask, other=own[0], volatile=True)
    w1 = tl.load(words + 1, mask=mask, other=own[1], volatile=True)
    w2 = tl.load(words + 2, mask=mask, other=own[2], volatile=True)
    w3 = tl.load(words + 3, mask=mask, other=own[3], volatile=True)
    return w0, w1, w2, w3


@triton.jit
def _is_sentinel(words):
    waits = (words[0] == _SENTINEL) | (words[1] == _SENTINEL) | (words[2] == _SENTINEL) | (words[3] == _SENTINEL)
    return tl.max(waits.to(tl.int32), axis=0) > 0


@triton.jit
def sum_of(found, TYPE: tl.constexpr, WORLD: tl.constexpr):
    """Adds up what `await_vectors` gave in the order of the ranks: fp32 [vectors, 4 or 8].

    Words hold elements of TYPE.
    """
    total = numbers_of(found[0], found[1], found[2], found[3], TYPE)
    for slot in tl.static_range(1, WORLD):
        total += numbers_of(found[4 * slot], found[4 * slot + 1], found[4 * slot + 2], found[4 * slot + 3], TYPE)
    return total
