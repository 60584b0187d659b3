"""Memory comes and goes under living tensors, and the books are exact."""

import torch

from fsdp.storage import Ledger, allocate, release, size_of, storage_key


def test_released_memory_comes_back_under_the_same_tensors() -> None:
    ledger = Ledger()
    buffer = torch.arange(6.0)
    view = buffer[2:4]
    release(buffer, ledger, "whole")
    assert buffer.untyped_storage().size() == 0
    allocate(buffer, ledger, "whole")
    buffer.copy_(torch.arange(6.0) * 2)
    assert view.tolist() == [4.0, 6.0]


def test_both_do_nothing_the_second_time() -> None:
    ledger = Ledger()
    buffer = torch.empty(6)
    ledger.add("whole", size_of(buffer))
    for _ in range(2):
        release(buffer, ledger, "whole")
        assert ledger.now == 0
    for _ in range(2):
        allocate(buffer, ledger, "whole")
        assert ledger.held == {"whole": 24}


def test_the_peak_is_the_most_ever_held_of_all_kinds_together() -> None:
    ledger = Ledger()
    a, b = torch.empty(0).new_empty(4), torch.empty(8, dtype=torch.bfloat16)
    release(a, Ledger(), "a")
    release(b, Ledger(), "b")
    allocate(a, ledger, "a")
    release(a, ledger, "a")
    allocate(b, ledger, "b")
    assert (ledger.now, ledger.peak) == (16, 16)
    allocate(a, ledger, "a")
    assert (ledger.now, ledger.peak) == (32, 32)
    release(a, ledger, "a")
    release(b, ledger, "b")
    assert (ledger.now, ledger.peak) == (0, 32)


def test_an_empty_buffer_costs_nothing() -> None:
    ledger = Ledger()
    buffer = torch.empty(0)
    release(buffer, ledger, "whole")
    allocate(buffer, ledger, "whole")
    assert ledger.peak == 0


def test_tensors_of_one_memory_have_one_key_also_while_it_is_released() -> None:
    one, other = torch.empty(6), torch.empty(6)
    assert storage_key(one[1:3]) == storage_key(one.view(2, 3).t()) == storage_key(one)
    assert storage_key(one) != storage_key(other)
    release(one, Ledger(), "whole")
    release(other, Ledger(), "whole")
    assert storage_key(one) != storage_key(other)
