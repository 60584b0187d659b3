"""How a sharded model runs a training program, and how a plain one does.

Every rank runs the same statements on its own data. Plain replicas run each on the data of all
ranks, and are compared after every statement.
"""

from collections import Counter
from contextlib import nullcontext

import torch
from torch import Tensor

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import unit_ref_of
from state_machine import ReshardPolicy
from tests.support.models import local
from tests.support.programs import (
    Backward,
    Clip,
    Drop,
    Evaluate,
    Forward,
    Program,
    Reload,
    Seen,
    Statement,
    Step,
    Summon,
    Toggle,
    Zero,
    learn,
    toggle,
)
from tests.support.summands import Summands
from tests.support.trees import Broken, TreeSpec


class ShardedRun:
    """One rank runs a program, and checks after every statement what must hold without knowing the right numbers."""

    def __init__(self, tree: TreeSpec, rank: int) -> None:
        self.learner = learn(tree, rank, sharded=True)
        self.model = self.learner.model
        self.engines: list[Engine] = []
        for module in self.model.modules():
            one = unit_ref_of(module)
            if one is not None and one.engine not in self.engines:
                self.engines.append(one.engine)
        self.parameters = list(self.model.parameters())
        self.on_device = self.parameters[0].device.type != "cpu"
        self.may_keep = False
        """A forward whose backward may come: the root, and what is not resharded after a forward, stays whole."""
        self.hook_calls = Counter[str]()
        prefix = f"{tree.hooked}."
        parameters = self.model.named_parameters() if tree.hooked else ()
        self.hooked = {name: p for name, p in parameters if name.startswith(prefix) and p.requires_grad and p.numel()}
        for name, parameter in self.hooked.items():
            # the model must not lead back to the losses: a graph with a checkpoint leads to the model, and no collector sees it
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name, calls=self.hook_calls: calls.update([name]))
        for module in self.model.modules() if rank % 2 else ():
            module.register_forward_hook(lambda *_: None)  # a log of some ranks alone: all must call the same collectives

    def run(self, program: Program) -> list[Seen]:
        seen = [self.see(Seen())]
        for number, statement in enumerate(program):
            seen.append(self.see(self.execute(number, statement)))
            self.check_rest()
        if self.learner.tree.uneven:
            fsdp.meet(self.model)
        self.learner.let_go()
        return seen

    def execute(self, number: int, statement: Statement) -> Seen:
        learner, model = self.learner, self.model
        seen = Seen()
        if learner.tree.uneven and isinstance(statement, Clip | Summon | Reload | Step):
            fsdp.meet(model)  # they communicate or change weights, and other ranks may still gather
        match statement:
            case Forward() | Backward():
                before = {name: None if p.grad is None else local(p.grad).clone() for name, p in model.named_parameters()}
                self.hook_calls.clear()
                learner.arm(statement.fault)
                forward = isinstance(statement, Forward)
                try:
                    seen.value = [learner.forward(number, statement)] if forward else self.backward(statement)
                except Broken:
                    seen.raised = True
                    self.await_clean_up()
                    self.check_untouched(before)
                learner.arm(None)
                seen.came = {name: self.hook_calls[name] for name in self.hooked}
                # of several roots, one whose own forward ended well does not hear that another one failed after it
                self.may_keep |= forward and (not seen.raised or learner.tree.several_roots)
            case Evaluate():
                seen.value = [learner.evaluate(number, statement)]
                self.may_keep |= statement.mode == "eval"
            case Drop():
                del learner.losses[statement.slot]
            case Zero():
                learner.optimizer.zero_grad(set_to_none=statement.set_to_none)
            case Step():
                learner.optimizer.step()
            case Clip():
                seen.value = [fsdp.clip_grad_norm_(model, statement.max_norm, statement.norm_type)]
            case Toggle():
                toggle(model, statement)
            case Summon():
                with fsdp.summon_full_params(model, writeback=statement.writeback), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            case Reload():
                full = fsdp.full_state_dict(model, rank0_only=False)
                fsdp.load_full_state_dict(model, {name: value * 2 for name, value in full.items()})
        return seen

    def backward(self, statement: Backward) -> list[Tensor]:
        rank = current_rank()
        backwards, called = {engine: engine.root.number for engine in self.engines}, len(rank.log)
        only_asks = self.learner.only_asks(statement)
        try:
            with nullcontext() if statement.sync else fsdp.no_sync(self.model):
                found = self.learner.backward(statement)
        finally:
            joined = [engine for engine, number in backwards.items() if engine.root.number != number]
            self.may_keep &= len(joined) < len(self.engines)
        allowed = (1, 2) if statement.slope else (1,)
        assert all(engine.root.number - backwards[engine] in allowed for engine in joined)
        reduced = [call.label for call in rank.log[called:] if call.kind == "reduce_scatter"]
        buckets = [
            unit.name for engine in joined for unit in engine.units for flat in unit.flats if any(flat.requires_grad_flags)
        ]
        if not statement.sync or only_asks:
            assert not reduced
        else:
            # a unit of which no rank has a gradient is left alone
            assert set(reduced) <= set(buckets)
            # each checkpoint is a backward of its own: a unit used in several of them may be complete twice; and what a
            # parent read before it called a unit brings its gradient after the unit was left
            twice = self.learner.tree.reentrant or self.learner.tree.reading
            once = all(reduced.count(name) <= buckets.count(name) for name in reduced)
            if self.on_device:  # buckets that share a coalesced collective are called after the first of them
                once = len(reduced) <= len(buckets)
            assert twice or once
        return found

    def await_clean_up(self) -> None:
        """On a device a thread of autograd drops a failed backward, when the error has reached the program already."""
        for engine in self.engines:
            engine.pending_backward.await_end()

    def check_untouched(self, before: dict[str, Tensor | None]) -> None:
        for name, parameter in self.model.named_parameters():
            then, now = before[name], parameter.grad
            assert (then is None) == (now is None), f"{name} has another .grad after a failed step"
            assert then is None or now is None or torch.equal(then, local(now)), f"{name} has another .grad after a failed step"
        assert not self.hook_calls, f"post-accumulate hooks were called in a failed step: {self.hook_calls}"

    def check_rest(self) -> None:
        now = list(self.model.parameters())
        assert len(now) == len(self.parameters) and all(one is other for one, other in zip(now, self.parameters, strict=True))
        for engine in self.engines:
            assert engine.root.at_rest
            held = {kind: count for kind, count in engine.tracker.held.items() if count and kind not in ("shards", "kept")}
            assert engine.tracker.held.get("kept", 0) == sum(
                kept.unsharded.nbytes for bucket in engine.reducer.buckets for kept in bucket.accumulated.values()
            )
            if self.may_keep or any(unit.config.reshard_policy is ReshardPolicy.NEVER for unit in engine.units):
                held.pop("whole", None)
            if any(unit.config.keeps_buckets for unit in engine.units):
                held.pop("bucket", None)
            assert not held, f"at rest, {engine.units[0].name} holds {held}"
            assert not any(engine.is_unsharded(index) for index in range(len(engine.units)))

    def see(self, seen: Seen) -> Seen:
        for name, parameter in self.model.named_parameters():
            seen.gradients[name] = None if parameter.grad is None else local(parameter.grad).clone()
            seen.weights[name] = local(parameter).clone()
        return seen


class PlainRun:
    """A plain replica for each rank runs a program on the data of that rank.

    Gradients and weights are those of the first replica: its `.grad` are averages over the ranks, and the others take over
    its weights before each pass. Each gradient was summed from some `counts` of numbers, whose absolute values have the
    sum `sizes`.
    """

    def __init__(self, tree: TreeSpec, world_size: int) -> None:
        self.learners = [learn(tree, rank, sharded=False) for rank in range(world_size)]
        self.replicas = [dict(learner.model.named_parameters()) for learner in self.learners]
        self.parameters = self.replicas[0]
        self.sizes = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.counts = dict.fromkeys(self.parameters, 0)
        hooked = set(self.learners[0].model.get_submodule(tree.hooked).parameters()) if tree.hooked else set()
        self.doubled = {name for name, p in self.parameters.items() if p in hooked and p.requires_grad}
        """By a hook of the tree's, after they were summed."""

    def execute(self, number: int, statement: Statement) -> list[Seen]:
        """What it leaves, seen by each rank: only `raised` and `value` differ."""
        seen = [Seen() for _ in self.learners]
        first = self.learners[0]
        match statement:
            case Forward() | Evaluate() | Backward():
                self._pass(number, statement, seen)
            case Drop():
                for learner in self.learners:
                    del learner.losses[statement.slot]
            case Zero():
                first.optimizer.zero_grad(set_to_none=statement.set_to_none)
                for size in self.sizes.values():
                    size.zero_()
                self.counts = dict.fromkeys(self.parameters, 0)
            case Step():
                first.optimizer.step()
            case Clip():
                # torch knows no inf norm of a tensor without elements
                filled = [parameter for parameter in self.parameters.values() if parameter.numel()]
                norm = torch.nn.utils.clip_grad_norm_(filled, statement.max_norm, statement.norm_type)
                factor = float(min(statement.max_norm / (norm + 1e-6), 1.0))
                for size in self.sizes.values():
                    size.mul_(factor)
                for one in seen:
                    one.value = [norm]
            case Toggle():
                for learner in self.learners:
                    toggle(learner.model, statement)
            case Summon() | Reload():
                factor = 2.0 if isinstance(statement, Reload) else 0.5 if statement.writeback else 1.0
                with torch.no_grad():
                    for parameter in self.parameters.values():
                        parameter.mul_(factor)
        return seen

    def let_go(self) -> None:
        """Of the graphs."""
        for learner in self.learners:
            learner.let_go()

    def _pass(self, number: int, statement: Forward | Evaluate | Backward, seen: list[Seen]) -> None:
        """One rank after the other; if it fails, it leaves the gradients as they were."""
        before = {name: p.grad for name, p in self.parameters.items()}
        self._follow()
        sums: dict[str, Tensor] = {}
        summands = [Summands() for _ in self.learners]
        everything = zip(self.learners, self.replicas, summands, seen, strict=True)
        for learner, parameters, heard, one in everything:
            for parameter in parameters.values():
                parameter.grad = None
            learner.arm(None if isinstance(statement, Evaluate) else statement.fault)
            try:
                match statement:
                    case Forward():
                        one.value = [learner.forward(number, statement)]
                    case Evaluate():
                        one.value = [learner.evaluate(number, statement)]
                    case Backward():
                        with heard.heard():
                            one.value = learner.backward(statement)
            except Broken:
                one.raised = True
            learner.arm(None)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    share = parameter.grad / len(self.learners)
                    sums[name] = sums[name] + share if name in sums else share
        failed = any(one.raised for one in seen)
        for one in seen:
            one.came = dict.fromkeys(() if failed else sums, 1)
        for name, parameter in self.parameters.items():
            then = before[name]
            parameter.grad = then
            if name in sums and not failed:
                parameter.grad = sums[name] if then is None else then + sums[name]
                factor = (1 + (name in self.doubled)) / len(self.learners)
                for parameters, heard in zip(self.replicas, summands, strict=True):
                    if parameters[name] in heard.counts:
                        self.sizes[name] += factor * heard.sizes[parameters[name]]
                        self.counts[name] += heard.counts[parameters[name]]

    @torch.no_grad()
    def _follow(self) -> None:
        """Weights that differ were changed when no graph was alive."""
        for parameters in self.replicas[1:]:
            for name, parameter in parameters.items():
                if not torch.equal(parameter, self.parameters[name]):
                    parameter.copy_(self.parameters[name])
