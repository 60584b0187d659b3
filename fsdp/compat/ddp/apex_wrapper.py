"""DistributedDataParallel with the constructor of Apex, over this engine with NO_SHARD."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp.compat.ddp.arguments import refuse_other_options
from fsdp.compat.ddp.wrapper import ReplicatedModule
from fsdp.config import MixedPrecisionPolicy, ReductionPolicy
from fsdp.errors import ShardingError


class DistributedDataParallel(ReplicatedModule):
    """Average the gradients of a module over all ranks, each of which keeps the full model.

    The arguments are those of `apex.parallel.DistributedDataParallel`. The page "From Apex" lists each of them.

    Raises:
        ShardingError: an argument asks for what this engine does not have, or the ranks do not agree.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        refuse_other_options(
            {
                "shared_param": shared_param,
                "retain_allreduce_buffers": retain_allreduce_buffers,
                "allreduce_communicators": allreduce_communicators,
                "gradient_average_split_factor": gradient_average_split_factor,
                "prof": prof,
            },
            ("module", "message_size", "gradient_predivide_factor"),
        )
        if allreduce_trigger_params is not None and delay_allreduce:
            raise ShardingError(
                "delay_allreduce=True reduces at the end, so allreduce_trigger_params mean nothing; leave them out."
            )
        if not gradient_average and gradient_predivide_factor != 1.0:
            raise ShardingError("gradient_average=False sums, so gradient_predivide_factor means nothing; leave it out.")
        super().__init__(
            module,
            reduction=ReductionPolicy(
                bucket_cap_mb=message_size * 4 / 2**20,  # elements of fp32
                at_end=delay_allreduce,
                triggers=_names_of(allreduce_trigger_params or (), module),
                average=gradient_average,
                predivide_factor=None if gradient_predivide_factor == 1.0 else gradient_predivide_factor,
                streams=num_allreduce_streams,
            ),
            sync_module_states=True,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32) if allreduce_always_fp32 else None,
        )

    def disable_allreduce(self) -> None:
        """Accumulate gradients on this rank from now on. See `fsdp.no_sync`."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """From now on, average gradients, those that were accumulated meanwhile included."""
        self.require_backward_grad_sync = True


def _names_of(params: Sequence[nn.Parameter], module: nn.Module) -> tuple[str, ...]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter in params:
        if id(parameter) not in names:
            raise ShardingError(
                f"allreduce_trigger_params: a parameter of shape {tuple(parameter.shape)} is not one of {type(module).__name__}."
            )
    return tuple(names[id(parameter)] for parameter in params)
