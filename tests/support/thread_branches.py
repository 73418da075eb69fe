"""Branches in PTX that threads of one warp may take apart.

A kernel in Triton branches by programs: what a thread does of its own accord is a predicate of one
instruction. But a compiler may turn a selection by the thread's number into two loops, and threads
in two loops wait forever for each other's part of a product of their warp. This finds such
branches, before a card hangs.
"""

from __future__ import annotations

import re

# What says which thread it is.
_SOURCES = ("%tid.", "%laneid")
# Instructions whose results are alike in all threads, or are taken to be: exchanges, loads from
# shared memory, and parameters. What a reduction makes of its own and of the other thread's is
# taken for alike from the first exchange on.
_ENDS = ("shfl.", "redux.", "vote.", "match.", "ld.shared", "ldmatrix", "ld.param")
_BUTTERFLY = "shfl.sync.bfly"
# Instructions without a result in a register.
_NO_RESULT = ("bra", "ret", "st.", "red.", "bar", "fence", "membar", "mbarrier", "cp.", "griddep", "prefetch")
_INSTRUCTION = re.compile(r"(?:@!?(?P<guard>%?\w+)\s+)?(?P<name>[a-z][\w.:]*)\s*(?P<operands>.*)")
_REGISTER = re.compile(r"%[a-z]\w*(?:\.[xyz])?|\b[a-z]\w*\b")


def branches_of_threads(ptx: str) -> list[str]:
    """Branches of a kernel's PTX whose condition follows from the number of a thread."""
    matches = (_INSTRUCTION.fullmatch(each) for each in _statements(ptx))
    instructions = [each for each in matches if each is not None]
    exchanged = {
        register
        for each in instructions
        if each["name"].startswith(_BUTTERFLY)
        for register in _REGISTER.findall(each["operands"].partition(",")[0])
    }
    differing: set[str] = set()
    while True:
        known = len(differing)
        for each in instructions:
            differing.update(_results_by_thread(each, differing, exchanged))
        if len(differing) == known:
            break
    return [each[0] for each in instructions if each["name"].startswith("bra") and each["guard"] in differing]


def _statements(ptx: str) -> list[str]:
    """Instructions, one by one, without labels, directives and comments."""
    parts = (line.split("//")[0].strip(" \t{}") for line in re.split(r"[;\n]", ptx))
    return [part for part in parts if part and not part.startswith((".", "$"))]


def _results_by_thread(instruction: re.Match[str], differing: set[str], exchanged: set[str]) -> list[str]:
    """The registers that an instruction writes, if threads may have different numbers in them.

    So may those of `differing`; those of `exchanged` came from another thread.
    """
    name, operands = instruction["name"], instruction["operands"]
    if name.startswith(_NO_RESULT + _ENDS):
        return []
    results, _, sources = operands.partition("}" if operands.startswith("{") else ",")
    read = [*_REGISTER.findall(sources), instruction["guard"] or ""]
    if not exchanged.isdisjoint(read) or not any(each in differing or each.startswith(_SOURCES) for each in read):
        return []
    return _REGISTER.findall(results)
