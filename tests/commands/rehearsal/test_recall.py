"""What is remembered of an operator is what the operator would return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp.commands.rehearsal.recall import Recall, Recalling
from fsdp.commands.rehearsal.rehearse import rehearse
from tests.commands.rehearsal.models import MODELS
from tests.commands.rehearsal.test_rehearse import BF16, STRATEGIES, job_of, options_of
from tests.support.everything import EVERYTHING


class Forgets(Recall):
    """Calls every operator."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_a_rehearsal_says_the_same_without_it(name: str) -> None:
    strategies = STRATEGIES if EVERYTHING else ("NO_SHARD",)
    for strategy, more in (*((one, {}) for one in strategies), ("FULL_SHARD", {"mp_policy": BF16})):
        options = options_of(MODELS[name], strategy, 4, **more)
        job = job_of(MODELS[name], 4)
        object.__setattr__(job, "recall", Forgets())
        assert rehearse(job_of(MODELS[name], 4), options) == rehearse(job, options)


def described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()


def flat(columns: int) -> Tensor:
    return torch.empty(6, columns, device="meta")


CALLS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "equal numbers of different types": (lambda: flat(4).int() * 2, lambda: flat(4).int() * 2.0),
    "true and one": (lambda: flat(4).int() + True, lambda: flat(4).bool() + True),
    "other strides": (lambda: flat(4) + 1, lambda: flat(4).t() + 1),
    "another dtype": (lambda: flat(4) + flat(4), lambda: flat(4) + flat(4).double()),
    "a tensor without dimensions": (lambda: flat(4) + flat(4).double(), lambda: flat(4) + flat(4).double()[0, 0]),
    "another keyword": (lambda: flat(4).sum(0, dtype=torch.float64), lambda: flat(4).sum(0)),
    "a longer list": (lambda: torch.cat([flat(4)] * 2), lambda: torch.cat([flat(4)] * 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ_have_results_of_their_own(name: str) -> None:
    with Recalling(Recall()):
        found = [described(call()) for call in CALLS[name] * 2]
    assert found == [described(call()) for call in CALLS[name] * 2]
    assert found[0] != found[1]


def test_a_result_is_new_at_every_call() -> None:
    with Recalling(Recall()):
        one, other = (flat(4) + 1 for _ in range(2))
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_parts_and_changes_in_place_stay_what_they_are() -> None:
    with Recalling(Recall()):
        for _ in range(2):
            whole = flat(4)
            assert whole[1:].untyped_storage()._cdata == whole.untyped_storage()._cdata
            assert whole.add_(1) is whole
            assert all(part._base is whole for part in whole.split(2))


def test_values_of_other_devices_are_computed_each_time() -> None:
    with Recalling(Recall()):
        assert [(torch.full((2,), float(number)) + 1).tolist() for number in range(2)] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_change_of_values_that_is_refused_once_is_refused_again() -> None:
    with Recalling(Recall()):
        for _ in range(2):
            assert flat(4).add_(flat(4)).shape == (6, 4)
            with pytest.raises(RuntimeError, match="shape"):
                flat(4).add_(flat(3))
            torch._foreach_add_([flat(4), flat(3)], [flat(4), flat(3)])
            with pytest.raises(RuntimeError):
                torch._foreach_add_([flat(4), flat(3)], [flat(4)])


def test_a_change_of_shape_is_made_each_time() -> None:
    with Recalling(Recall()):
        assert [flat(4).t_().shape for _ in range(2)] == [(4, 6)] * 2
        outputs = [flat(1) for _ in range(2)]
        for output in outputs:
            torch.add(flat(4), 1, out=output.resize_(0))
        assert [output.shape for output in outputs] == [(6, 4)] * 2


def test_the_version_of_a_tensor_counts_every_change() -> None:
    whole = flat(4)
    with Recalling(Recall()):
        for _ in range(3):
            whole.mul_(2)
    assert whole._version == 3
