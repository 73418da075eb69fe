"""Vectors of 16 bytes that go from card to card without a flag: four words of 32 bits, each of which is its own flag.

Owns the *blank*, the word that stands where nothing has come yet, all of whose bits are set: as fp32 one NaN of many, as two numbers of 16 bits two NaNs of many. Words that are sent are never blank, for a NaN is as good as another (`load_vectors`).
So no number, zero of either sign or infinity is changed, and no bit pattern can be waited for in vain.

A vector may arrive in pieces, but no word does, which is why all four words are looked at. The assembly is one instruction per vector that the compiler can neither leave out nor move across another of these; in Triton's interpreter plain loads
and stores take its place.
"""

# Triton's decorator has no types, and what a kernel's arguments are here and in the compiler differs.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.triton_runtime import INTERPRETED

BLANK = -1
# Two NaNs of 16 bits, or one of 32.
_NAN = tl.constexpr(0x7FFF7FFF)
_BLANK = tl.constexpr(BLANK)
_PLAIN = tl.constexpr(INTERPRETED)
_WORDS = 4
# The result is nothing: assembly must have one.
_SEND = tl.constexpr(
    "{ .reg .pred p; setp.ne.s64 p, $1, 0; @p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)


@triton.jit
def _sendable(words):
    """Words as they are sent, none of them blank."""
    return tl.where(words == _BLANK, _NAN, words)


@triton.jit
def load_vectors(numbers, vectors, mask):
    """Sendable words of the vectors at `numbers`, a multiple of 16 bytes: four tensors of a word of each. Zeros where the mask is not set."""
    offs = vectors[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = numbers.to(tl.pointer_type(tl.int32))
    found = _sendable(tl.load(words + offs, mask=mask[:, None], other=0))
    even, odd = tl.split(tl.reshape(found, (vectors.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def numbers_of(w0, w1, w2, w3, TYPE: tl.constexpr):
    """The vectors' numbers, fp32 [vectors, 4 or 8], of words of TYPE."""
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (w0.shape[0], 4))
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
    """One vector of each rank's slot, again and again as long as a word of it is blank; of this rank's own the words that are given. All that are looked at are under way at once."""
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
        # The greatest of unsigned words is the blank one if any is.
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
def blank_vectors(address, vectors, mask):
    """Makes vectors at `address` blank, in this card's memory."""
    offs = vectors[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    tl.store(words + offs, tl.full((vectors.shape[0], 4), _BLANK, tl.int32), mask=mask[:, None])


@triton.jit
def send_vectors(address, vectors, w0, w1, w2, w3, mask):
    """Stores words at `address` (int64, of any card's memory), by vectors, each once: there must be as many vectors as threads or more."""
    places = address + vectors.to(tl.int64) * 16
    if _PLAIN:
        words = places.to(tl.pointer_type(tl.int32))
        tl.store(words, w0, mask=mask)
        tl.store(words + 1, w1, mask=mask)
        tl.store(words + 2, w2, mask=mask)
        tl.store(words + 3, w3, mask=mask)
    else:
        # Address 0: nothing is stored.
        places = tl.where(mask, places, 0)
        tl.inline_asm_elementwise(
            _SEND, "=r,l,r,r,r,r", [places, w0, w1, w2, w3], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_sum(address, vectors, mask, rank, w0, w1, w2, w3, SLOT_BYTES: tl.constexpr, WORLD: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Waits for vectors in all slots, SLOT_BYTES apart from `address` on, and adds them up in the order of the ranks: fp32 [vectors, 4 or 8]. In place of this rank's own slot stand the words that are given."""
    places = tl.where(mask, address + vectors.to(tl.int64) * 16, 0)
    if _PLAIN:
        total = tl.zeros((vectors.shape[0], 16 // (TYPE.primitive_bitwidth // 8)), tl.float32)
        for slot in tl.static_range(WORLD):
            others = mask & (rank != slot)
            words = (places + slot * SLOT_BYTES).to(tl.pointer_type(tl.int32))
            v0, v1, v2, v3 = _look(words, others, w0, w1, w2, w3)
            while tl.max(((v0 == _BLANK) | (v1 == _BLANK) | (v2 == _BLANK) | (v3 == _BLANK)).to(tl.int32), axis=0) > 0:
                v0, v1, v2, v3 = _look(words, others, w0, w1, w2, w3)
            part = numbers_of(v0, v1, v2, v3, TYPE)
            total = part if slot == 0 else total + part
    else:
        assembly: tl.constexpr = _await_assembly(WORLD, SLOT_BYTES)
        constraints: tl.constexpr = _await_constraints(WORLD)
        types: tl.constexpr = _await_types(WORLD)
        found = tl.inline_asm_elementwise(assembly, constraints, [places, rank, w0, w1, w2, w3], dtype=types, is_pure=False, pack=1)  # fmt: skip
        total = numbers_of(found[0], found[1], found[2], found[3], TYPE)
        for slot in tl.static_range(1, WORLD):
            total += numbers_of(found[4 * slot], found[4 * slot + 1], found[4 * slot + 2], found[4 * slot + 3], TYPE)
    return total


@triton.jit
def _look(words, mask, w0, w1, w2, w3):
    v0 = tl.load(words, mask=mask, other=w0, volatile=True)
    v1 = tl.load(words + 1, mask=mask, other=w1, volatile=True)
    v2 = tl.load(words + 2, mask=mask, other=w2, volatile=True)
    v3 = tl.load(words + 3, mask=mask, other=w3, volatile=True)
    return v0, v1, v2, v3
