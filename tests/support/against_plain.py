"""Compares what the ranks of a sharded run saw with plain torch, statement by statement."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp.comm.simulated import current_rank, simulate
from tests.support.models import join
from tests.support.programs import Backward, Program, Seen, Statement, Zero
from tests.support.runs import PlainRun, ShardedRun
from tests.support.trees import TreeSpec

ROUNDING = 2.0**-24
"""Half a unit in the last place of fp32, relative."""
PROMISED = 1e-6


def check(tree: TreeSpec, program: Program, world_size: int, seed: int) -> None:
    """Run `program` on every rank and on the plain model, and compare after every statement."""

    def one_rank(rank: int) -> tuple[list[Seen], list[tuple[str, str, str]]]:
        here = current_rank()
        seen = ShardedRun(tree, rank).run(program)
        # "replica of ranks 0, 2" are those of other ranks elsewhere
        return seen, [(call.comm.partition(" of ")[0], call.kind, call.label) for call in here.log]

    ranks = simulate(world_size, one_rank, seed)
    # the world sees to it that each channel's are the same; a rank whose gradients are complete later may reduce later
    if tree.uneven or not tree.branching:
        assert all(log == ranks[0][1] for _, log in ranks), "the ranks called collectives in different orders"
    compare_with_plain(tree, program, [seen for seen, _ in ranks])


def compare_with_plain(tree: TreeSpec, program: Program, ranks: Sequence[Sequence[Seen]]) -> None:
    """Run `program` on the plain model, and compare after every statement with what each rank saw.

    The plain model goes on from what the ranks had, so that what is compared is one statement, not how
    roundings grow over several.
    """
    plain = PlainRun(tree, len(ranks))
    elements = sum(p.numel() for p in plain.parameters.values())
    kept = False
    compare(plain, [seen[0] for seen in ranks], kept)
    for number, statement in enumerate(program):
        wanted = plain.execute(number, statement)
        found = [seen[number + 1] for seen in ranks]
        for one, other in zip(found, wanted, strict=True):
            assert one.raised == other.raised, f"statement {number}: raised is {one.raised}, in the plain model {other.raised}"
            compare_values(one, other, elements)
        if not kept and not (isinstance(statement, Backward) and not statement.sync):
            for name, calls in ((name, calls) for one in found for name, calls in one.came.items()):
                assert calls == wanted[0].came.get(name, 0), f"statement {number}: {calls} calls of the hook on {name}"
        kept = keeps(statement, wanted[0].raised, kept)
        compare(plain, found, kept, f"statement {number}, {statement}: ")
    plain.let_go()


def keeps(statement: Statement, raised: bool, kept: bool) -> bool:
    """Whether gradients are kept under no_sync after a statement."""
    match statement:
        case Zero():
            return False
        case Backward(sync=sync) if not raised:
            # one that only asks for gradients of inputs reduces nothing
            return not sync or (kept and bool(statement.only))
    return kept


def compare_values(found: Seen, wanted: Seen, elements: int) -> None:
    """Losses and gradients of inputs have no sum over ranks in them; a norm is a sum over all elements."""
    assert len(found.value) == len(wanted.value)
    for one, other in zip(found.value, wanted.value, strict=True):
        torch.testing.assert_close(one, other, rtol=PROMISED + elements * ROUNDING, atol=PROMISED, check_dtype=False)


def compare(plain: PlainRun, found: list[Seen], kept: bool, where: str = "") -> None:
    """Gradients and weights of all ranks, put together, with the plain model's; then it takes them over.

    A sum of n numbers has at most n - 1 roundings of the sum of their absolute values in it, in any order, and one more
    where an average divides them: two orders differ by at most 2 n of them, which is much where the numbers cancel. That
    comes on top of the promise.
    """
    for name, parameter in plain.parameters.items():
        weight = join([one.weights[name] for one in found], parameter.shape)
        assert weight is not None
        assert_near(weight, parameter.detach(), 0.0, f"{where}weight {name}")
        if not torch.equal(weight, parameter):  # only a statement that changes weights can bring this about
            with torch.no_grad():
                parameter.copy_(weight)
        if kept:
            continue
        for rank, one in enumerate(found):
            if one.weights[name].numel():
                here, there = one.gradients[name] is None, parameter.grad is None
                assert here == there, f"{where}{name}.grad is None: {here} on rank {rank}, {there} in the plain model"
        gradient = join([one.gradients[name] for one in found], parameter.shape) if parameter.numel() else None
        if gradient is not None and parameter.grad is not None:
            size = float(plain.sizes[name].max())
            assert_near(gradient, parameter.grad, 2 * plain.counts[name] * ROUNDING * size, f"{where}gradient {name}")
            parameter.grad.copy_(gradient)
            # what comes next is added to that, which is the same for both
            plain.sizes[name], plain.counts[name] = gradient.abs(), 1


def assert_near(one: Tensor, other: Tensor, slack: float, what: str) -> None:
    if other.numel():
        distance, allowed = float((one - other).abs().max()), PROMISED * float(other.abs().max()) + slack
        assert distance <= allowed, f"{what} is off by {distance:.3g}, allowed {allowed:.3g}"
