"""Random trees and training programs of which each rank takes its own calls, with `uneven_paths`: the numbers of plain torch."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.against_plain import check
from tests.support.everything import EVERYTHING
from tests.support.programs import Program
from tests.support.strategies import uneven
from tests.support.trees import How, TreeSpec


@settings(max_examples=1_000 if EVERYTHING else 12)
@given(uneven(), st.sampled_from((2, 3, 2, 4, 8) if EVERYTHING else (2, 3)), st.integers(0, 2**16))
def test_any_program_on_any_tree_trains_like_the_plain_model(drawn: tuple[TreeSpec, Program], world_size: int, seed: int) -> None:
    check(*drawn, world_size, seed)


def test_ranks_take_their_own_calls() -> None:
    """The property above says something: ranks choose differently, a replay chooses as the forward did."""
    taken = {rank: [How(rank, True, 5).takes(call) for call in range(8)] for rank in range(3)}
    assert len({tuple(one) for one in taken.values()}) == 3
    assert taken[1] == [How(1, True, 5).takes(call) for call in range(8)]
