"""How the tensors of an optimizer's state lie on the ranks: found out from the shape that each rank has.

An optimizer makes its state from shards. Most tensors are cut as the parameter is. Some have one number for each row of it, and
their rows lie where its rows lie. Some (a step count) are equal on all ranks. Some are statistics over one rank's part, and have
no full form.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import prod
from typing import Any, Final, NoReturn, TypeGuard

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.comm.exchanges import gather_parts
from fsdp.errors import ShardingError
from fsdp.shards.cut import Cut, Shape, part_shape
from fsdp.shards.sharded_value import ShardedValue

PLAIN: Final = (bool, int, float, str, type(None))
State = dict[Any, dict[str, Any]]
"""Values by the name or number of the parameter, and by the optimizer's own key, such as "exp_avg"."""
Place = Callable[[str, Mapping[int, Shape], torch.dtype], "StatePlacement"]
"""Gives the placement of a tensor that has these shapes on the ranks that have it; errors begin with the text."""


class StatePlacement:
    """How one tensor of one parameter's state lies on the ranks."""

    __slots__ = ("_cut", "dtype", "shape")

    def __init__(self, shape: Shape, dtype: torch.dtype, cut: Cut | None) -> None:
        """`cut`: None if each rank has one of its own; over one rank, if every rank has all of it."""
        self.shape = shape
        """The shape of the full tensor; of a statistic, that of the first rank that has one."""
        self.dtype = dtype
        self._cut = cut

    @property
    def is_per_rank(self) -> bool:
        """Whether it is a statistic over each rank's part, which has no full form."""
        return self._cut is None

    def span(self, rank: int) -> tuple[int, int]:
        """The first element and the number of elements that `rank` has of the flattened full tensor."""
        if self._cut is None or self._cut.num_ranks == 1:
            return 0, prod(self.shape)
        return self._cut.spans()[rank][1:]

    def local_shape(self, rank: int) -> Shape:
        """The shape of the tensor on `rank`."""
        return part_shape(self.shape, self.span(rank)[1], self._cut is not None and self._cut.by_element)

    def part_of(self, full: Tensor, rank: int) -> Tensor:
        """The part of a full tensor that belongs on `rank`, this one: a copy, so that the full tensor can be freed."""
        first, numel = self.span(rank)
        return full.detach().reshape(-1)[first : first + numel].view(self.local_shape(rank)).clone()

    def value(self, name: str, local: Tensor, rank: int) -> Tensor:
        """`local`, the tensor on `rank`, as Distributed Checkpoint can save and load it."""
        if self._cut is None or self._cut.numel_first is None:
            return local
        return ShardedValue(name, local, self.shape, self.span(rank)[0])

    def empty(self, name: str, rank: int, device: torch.device) -> Tensor:
        """New memory for the tensor on `rank`, this one, as Distributed Checkpoint can load it."""
        return self.value(name, torch.empty(self.local_shape(rank), dtype=self.dtype, device=device), rank)

    def gather(self, where: str, local: Tensor | None, comm: Communicator, device: torch.device) -> Tensor:
        """The full tensor, on every rank. Each rank that has elements of it sends them to all others.

        Raises:
            ShardingError: it is a statistic. No rank sends anything. The error begins with `where`.
        """
        if self._cut is None:
            raise ShardingError(
                f"{where} has shape {self.shape} on each rank, a statistic over that rank's part alone, and no full form; "
                "fsdp.save keeps it for the same number of ranks."
            )
        if self._cut.num_ranks == 1:
            assert local is not None, "every rank has all of it"
            return local.detach()
        full = torch.empty(self.shape, dtype=self.dtype, device=device)
        return gather_parts(full, self._cut.spans(), local, comm, where)


def everywhere(shape: Shape, dtype: torch.dtype) -> StatePlacement:
    """The placement of a tensor that every rank has in full."""
    return StatePlacement(shape, dtype, Cut(shape, 1, 0, None, None))


def place_local(where: str, cut: Cut, shapes: Mapping[int, Shape], dtype: torch.dtype) -> StatePlacement:
    """Infer a placement from the shape that each rank has. The parameter is cut by `cut`.

    An error, if a rank that holds a part of the parameter has no such tensor, begins with `where`.
    """
    holders = [rank for rank, numel in enumerate(cut.numels()) if numel]
    refuse_absent(where, holders, shapes)
    local = [shapes[rank] for rank in holders]
    if len(holders) == 1:
        return StatePlacement(local[0], dtype, cut._replace(shape=local[0]))
    candidates = [StatePlacement(cut.shape, dtype, cut)]
    if local and local[0] and _keeps_rows(cut, local[0]):
        candidates.append(_by_row(cut, local[0][1:], dtype))
    for one in candidates:
        if local == [one.local_shape(rank) for rank in holders]:
            return one
    return StatePlacement(local[0], dtype, None)


def place_full(where: str, cut: Cut, shape: Shape, dtype: torch.dtype) -> StatePlacement:
    """Choose the placement of a full tensor of `shape`.

    An error, if the parameter is cut and the tensor has neither its shape nor its number of rows, begins with `where`.
    """
    if sum(map(bool, cut.numels())) <= 1:
        return StatePlacement(shape, dtype, cut._replace(shape=shape, numel_first=None, numel_next=None))
    if shape == cut.shape:
        return StatePlacement(shape, dtype, cut)
    if _keeps_rows(cut, shape) and shape[:1] == cut.shape[:1]:
        return _by_row(cut, shape[1:], dtype)
    refuse_shape(where, shape, cut.shape)


def refuse_shape(where: str, shape: Shape, param_shape: Shape) -> NoReturn:
    """Raise ShardingError: a full tensor of `shape` has no parts that belong to those of the parameter."""
    raise ShardingError(
        f"{where} has shape {shape}, which cannot be cut like the parameter, whose shape is {param_shape}: it is a "
        "statistic over more than one rank's part. Load it on one rank, or drop it from the state dict "
        "and let the optimizer start it anew."
    )


def refuse_absent(where: str, ranks: Sequence[int], shapes: Mapping[int, Shape]) -> None:
    """Raise ShardingError unless all of `ranks`, which hold a part of the parameter, have a tensor."""
    if absent := [rank for rank in ranks if rank not in shapes]:
        raise ShardingError(f"{where} is missing on ranks {absent}, which hold a part of the parameter; step every rank alike.")


def _keeps_rows(cut: Cut, shape: Shape) -> bool:
    """Whether each row of the parameter lies on one rank, so that a tensor of `shape` may have a row for each."""
    return len(cut.shape) > 1 and not cut.by_element and 0 not in shape


def _by_row(cut: Cut, rest: Shape, dtype: torch.dtype) -> StatePlacement:
    return StatePlacement((cut.shape[0], *rest), dtype, cut.of_rows(rest))


def outline_of(operation: str, state: Mapping[Any, Mapping[str, Any]], names: Mapping[Any, str]) -> State:
    """`state` with a tensor on the meta device in place of each tensor that has dimensions. `names`: those of the parameters.

    An error, if a value is neither a tensor nor plain, begins with `operation`.
    """
    found: State = {}
    for number, kept in state.items():
        found[number] = {}
        for key, value in kept.items():
            if not isinstance(value, (Tensor, *PLAIN)):
                raise ShardingError(
                    f"{where_of(operation, key, names.get(number, number))} is a {type(value).__name__}; only tensors and plain "
                    "values can be kept."
                )
            if isinstance(value, Tensor):
                is_tensor = bool(value.dim())
                value = torch.empty(value.shape, dtype=value.dtype, device="meta") if is_tensor else value.detach().cpu().clone()
            found[number][key] = value
    return found


def placed(operation: str, by_rank: Sequence[State], place: Mapping[Any, Place], names: Mapping[Any, str]) -> State:
    """The state that any rank has, with its placement in place of each tensor that has dimensions. `by_rank`: their outlines.

    `place`: of each sharded parameter. The state of any other is the same on every rank that has it. All ranks compute the same.

    Raises:
        ShardingError: some state is missing on a rank that holds a part of the parameter, or a number differs between ranks.
    """
    found: State = {}
    for number, key in dict.fromkeys((number, key) for state in by_rank for number, kept in state.items() for key in kept):
        where = where_of(operation, key, names.get(number, number))
        there = {rank: state[number][key] for rank, state in enumerate(by_rank) if key in state.get(number, {})}
        first = next(iter(there.values()))
        if has_dimensions(first):
            shapes = {rank: tuple(one.shape) for rank, one in there.items() if has_dimensions(one)}
            one = place[number](where, shapes, first.dtype) if number in place else everywhere(tuple(first.shape), first.dtype)
        elif any(value != first for value in there.values()):
            raise ShardingError(f"{where} differs between ranks: {there}; step every rank alike.")
        else:
            one = deepcopy(first)  # simulated ranks share objects
        found.setdefault(number, {})[key] = one
    return found


def has_dimensions(value: object) -> TypeGuard[Tensor]:
    """Whether a value of the state is a tensor and no number."""
    return isinstance(value, Tensor) and bool(value.dim())


def where_of(operation: str, key: str, name: object) -> str:
    """The beginning of an error about a value."""
    return f"{operation}: {key!r} of parameter {name!r}"
