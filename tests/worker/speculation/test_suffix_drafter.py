"""What is drafted from earlier answers: of the same tenant alone, and in bounded memory."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.worker.driver import admission, id_bytes, step

from headrace_backend.step.plan import RowAdmission
from headrace_backend.worker.speculation.drafter import ComputedTokens, SettledTokens
from headrace_backend.worker.speculation.suffix_drafter import SuffixDrafter, TenantMemories

ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]
CPU = torch.device("cpu")


def make_drafter(max_memories: int = 2) -> SuffixDrafter:
    return SuffixDrafter(3, num_rows=4, max_model_len=64, device=CPU, memory_tokens=32, max_memories=max_memories)


def admitted(row: int, tenant: bytes, *prompt: int) -> RowAdmission:
    return admission(row, tenant=tenant, prompt_ids=id_bytes(*prompt))


def settle(drafter: SuffixDrafter, row: int, position: int, *tokens: int) -> list[int]:
    """Settles tokens of one row, the first at `position` of its sequence; gives what is drafted."""
    settled = SettledTokens(
        rows=torch.tensor([row], dtype=torch.int32),
        rows_on_host=np.array([row], np.int32),
        positions=torch.tensor([position]),
        tokens=torch.tensor([tokens]),
        counts=torch.tensor([len(tokens)], dtype=torch.int32),
        output_positions=torch.tensor([0], dtype=torch.int32),
        num_wanted=drafter.num_drafts,
    )
    [drafts] = drafter.propose(settled).tolist()
    found: list[int] = drafts
    return found


def give_back(drafter: SuffixDrafter, *rows: int) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    drafter.follow(step([], released=rows), ComputedTokens(nothing, nothing, None))  # type: ignore[arg-type]  # not looked at


def answer_once(drafter: SuffixDrafter, tenant: bytes, row: int = 0) -> None:
    """A row of a tenant that answers ANSWER to a prompt of two tokens, and is given back."""
    drafter.admit([admitted(row, tenant, 1, 2)])
    settle(drafter, row, 2, *ANSWER)
    give_back(drafter, row)


def test_an_earlier_answer_of_the_same_tenant_is_drafted() -> None:
    drafter = make_drafter()
    answer_once(drafter, b"one")
    drafter.admit([admitted(1, b"one", 5, 6, 7)])
    assert settle(drafter, 1, 3, 12, 13) == [14, 15, 16]
    # A prompt's tokens are no answer.
    assert settle(drafter, 1, 5, 1, 2) == [2, 2, 2]


def test_other_tenants_never_see_it() -> None:
    drafter = make_drafter()
    answer_once(drafter, b"one")
    drafter.admit([admitted(1, b"other", 5, 6, 7)])
    assert settle(drafter, 1, 3, 12, 13) == [13, 13, 13]


def test_a_row_that_is_taken_again_at_once_leaves_its_answer_too() -> None:
    drafter = make_drafter()
    drafter.admit([admitted(0, b"one", 1, 2)])
    settle(drafter, 0, 2, *ANSWER)
    drafter.admit([admitted(0, b"one", 5, 6, 7)])
    assert settle(drafter, 0, 3, 12, 13) == [14, 15, 16]


def test_the_rows_own_tokens_come_first_where_both_know_as_much() -> None:
    drafter = make_drafter()
    answer_once(drafter, b"one")
    drafter.admit([admitted(1, b"one", 12, 13, 50, 51, 52)])
    assert settle(drafter, 1, 5, 12, 13) == [50, 51, 52]


def test_the_tenant_that_was_idle_longest_loses_its_memory() -> None:
    drafter = make_drafter(max_memories=2)
    for tenant in (b"one", b"two", b"three"):
        answer_once(drafter, tenant)
    drafter.admit([admitted(1, b"one", 5, 6, 7), admitted(2, b"three", 5, 6, 7)])
    assert settle(drafter, 2, 3, 12, 13) == [14, 15, 16]
    # That of "one" went to "three", and "one" has that of "two" now, emptied.
    assert settle(drafter, 1, 3, 12, 13) == [13, 13, 13]


def test_a_tenant_that_finds_no_memory_drafts_from_its_own_rows_alone() -> None:
    drafter = make_drafter(max_memories=1)
    drafter.admit([admitted(0, b"one", 1, 2)])
    answer_once(drafter, b"two", row=1)
    drafter.admit([admitted(1, b"two", 21, 22, 23, 24)])
    assert settle(drafter, 1, 4, 12, 13) == [13, 13, 13]
    assert settle(drafter, 1, 6, 21, 22) == [23, 24, 12]


def test_after_a_step_that_raised_no_row_is_taken() -> None:
    drafter = make_drafter(max_memories=1)
    drafter.admit([admitted(0, b"one", 1, 2)])
    settle(drafter, 0, 2, *ANSWER)
    drafter.reset()
    give_back(drafter, 0)
    answer_once(drafter, b"two")
    drafter.admit([admitted(1, b"two", 5, 6, 7)])
    assert settle(drafter, 1, 3, 12, 13) == [14, 15, 16]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_a_memory_is_never_taken_from_a_tenant_with_rows(actions: list[tuple[bool, int]]) -> None:
    memories, held = TenantMemories(2), {}
    for enters, number in actions:
        tenant = bytes([number])
        if enters:
            slot, is_new = memories.enter(tenant)
            if slot == memories.none:
                # Everybody else's is in use.
                assert tenant not in held and len(held) == 2
                continue
            assert not is_new or tenant not in held
            assert all(slot != other for name, (other, _) in held.items() if name != tenant)
            held[tenant] = slot, held.get(tenant, (slot, 0))[1] + 1
        elif tenant in held:
            memories.leave(tenant)
            slot, count = held.pop(tenant)
            if count > 1:
                held[tenant] = slot, count - 1
