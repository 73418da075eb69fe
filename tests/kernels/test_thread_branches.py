"""Branches of single threads are found in PTX, and others are not."""

from __future__ import annotations

import pytest
from tests.support.thread_branches import branches_of_threads

PROLOGUE = """
.visible .entry kernel(.param .u64 .ptr .global .align 1 kernel_param_0) .maxntid 128
{
    .reg .pred %p<9>;
    mov.u32 %r1, %tid.x; // which thread
    and.b32 %r2, %r1, 1;
"""


@pytest.mark.parametrize(
    ("code", "branches"),
    [
        ("setp.eq.b32 %p1, %r2, 0;\n@%p1 bra $L__BB0_3;", ["@%p1 bra $L__BB0_3"]),
        ("setp.eq.b32 %p1, %r2, 0;\n@!%p1 bra.uni $L__BB0_3;", ["@!%p1 bra.uni $L__BB0_3"]),
        # By way of a load, of both results of a vector, and of a predicate that another one guards.
        ("ld.global.v2.b32 {%r3, %r4}, [%r2];\nsetp.eq.b32 %p1, %r4, 0;\n@%p1 bra $L__BB0_3;", ["@%p1 bra $L__BB0_3"]),
        ("setp.eq.b32 %p1, %r2, 0;\n@%p1 mov.b32 %r5, 7;\nsetp.ne.b32 %p2, %r5, 7;\n@%p2 bra $L__BB0_3;",
         ["@%p2 bra $L__BB0_3"]),
        # Known only once what stands behind the branch is.
        ("$L__BB0_1:\nsetp.eq.b32 %p1, %r6, 9;\n@%p1 bra $L__BB0_3;\nadd.s32 %r6, %r6, %r2;\nbra $L__BB0_1;",
         ["@%p1 bra $L__BB0_3"]),
        # A predicate of one instruction, a reduction, a program's number, an argument.
        ("setp.eq.b32 %p1, %r2, 0;\n@%p1 st.global.b32 [%rd1], {%r2};", []),
        ("shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;\nadd.s32 %r4, %r2, %r3;\nsetp.eq.b32 %p1, %r4, 0;\n"
         "@%p1 bra $L__BB0_3;", []),
        ("mov.u32 %r3, %ctaid.x;\nsetp.eq.b32 %p1, %r3, 0;\n@%p1 bra $L__BB0_3;", []),
        ("ld.param.b32 %r3, [kernel_param_0];\nsetp.eq.b32 %p1, %r3, 0;\n@%p1 bra $L__BB0_3;", []),
    ],
)  # fmt: skip
def test_a_branch_that_follows_from_a_threads_number_is_found(code: str, branches: list[str]) -> None:
    assert branches_of_threads(PROLOGUE + code + "\n$L__BB0_3:\n\tret;\n}\n") == branches
