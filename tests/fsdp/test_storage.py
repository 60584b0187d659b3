"""Memory comes and goes under living tensors, and the books are exact."""

import torch

from fsdp.storage import Ledger, Memory, storage_key


def test_released_memory_comes_back_under_the_same_tensors() -> None:
    ledger = Ledger()
    buffer = torch.arange(6.0)
    view = buffer[2:4]
    memory = Memory(buffer, "whole")
    assert buffer.untyped_storage().size() == 0
    memory.allocate(ledger)
    buffer.copy_(torch.arange(6.0) * 2)
    assert view.tolist() == [4.0, 6.0]
    memory.release(ledger)
    assert buffer.untyped_storage().size() == 0


def test_both_do_nothing_the_second_time() -> None:
    ledger = Ledger()
    memory = Memory(torch.empty(6), "whole")
    for _ in range(2):
        memory.allocate(ledger)
        assert ledger.held == {"whole": 24}
    for _ in range(2):
        memory.release(ledger)
        assert ledger.now == 0


def test_the_peak_is_the_most_ever_held_of_all_kinds_together() -> None:
    ledger = Ledger()
    a, b = Memory(torch.empty(4), "a"), Memory(torch.empty(8, dtype=torch.bfloat16), "b")
    a.allocate(ledger)
    a.release(ledger)
    b.allocate(ledger)
    assert (ledger.now, ledger.peak) == (16, 16)
    a.allocate(ledger)
    assert (ledger.now, ledger.peak) == (32, 32)
    a.release(ledger)
    b.release(ledger)
    assert (ledger.now, ledger.peak) == (0, 32)


def test_an_empty_buffer_costs_nothing() -> None:
    ledger = Ledger()
    Memory(torch.empty(0), "whole").allocate(ledger)
    assert ledger.peak == 0


def test_tensors_of_one_memory_have_one_key_also_while_it_is_released() -> None:
    one, other = torch.empty(6), torch.empty(6)
    assert storage_key(one[1:3]) == storage_key(one.view(2, 3).t()) == storage_key(one)
    assert storage_key(one) != storage_key(other)
    Memory(one, "whole")
    Memory(other, "whole")
    assert storage_key(one) != storage_key(other)
