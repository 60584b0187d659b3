"""The inputs of another rank, for a rank inside a join that has never had a batch."""

import pickle
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fsdp.comm.communicator import Communicator


class InputsOfOthers:
    """The inputs of this rank's last forward, for a rank that has never had a batch."""

    def __init__(self, args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> None:
        self._inputs = None if args is None else (args, kwargs)

    def exchange(self, comm: Communicator, source: int, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the inputs of `source`, on `device`; None if they cannot be pickled. Every rank calls it."""
        mine = self._pickled() if comm.rank == source else None
        pickled = comm.gather_objects(mine, "inputs for ranks without a batch")[source]
        if pickled is None:
            return None
        on_device = tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, pickle.loads(pickled))
        return on_device[0], on_device[1]

    def _pickled(self) -> bytes | None:
        on_host = tree_map(lambda one: one.detach().cpu() if isinstance(one, Tensor) else one, self._inputs)
        try:
            return pickle.dumps(on_host)
        except (pickle.PicklingError, AttributeError, TypeError):  # what pickle raises for a lambda, a local class, a lock
            return None
