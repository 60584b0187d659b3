"""Random programs of moves and acts are equal to plain torch, or refused on all ranks; and programs that once were neither."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.acts.machine import LATER, ActsAtAnyMoment, check
from tests.acts.trial import Arm, Backward, Do, Evaluate, Forward, Program, Step, Sync, Zero

EXAMPLES = 60
MOVES = 14
PASS = (Forward(9), Backward(9))
KEPT = (Sync(False), *PASS, Sync(True))
FOUND: dict[str, Program] = {
    "a module that was put in while all was frozen is thawed": (
        Do("replace a module inside a unit"),
        Do("call the model frozen, thaw it"),
        *PASS,
    ),
    "new memory for shards in inference mode": (Do("convert one unit"), Do("evaluate in inference mode"), Forward(9)),
    "a forward in a recompute calls units that are frozen for it": (
        Arm("in a recompute", "call the model frozen, thaw it"),
        *PASS,
        Forward(1),
        Backward(1),
    ),
    "a recompute thaws a unit that comes later in the backward": (
        Arm("in a recompute", "freeze a parameter and thaw it"),
        Forward(1),
        Do("freeze a parameter"),
        Backward(1, retain=True),
    ),
    "a unit that was evaluated in a post-accumulate hook shows unsharded parameters": (
        Arm("in a post-accumulate hook", "evaluate one module"),
        Arm("in a post-accumulate hook", "read the norm of every gradient"),
        *PASS,
    ),
    "a forward that fails leaves a gradient in unsharded parameters": (
        Arm("in a pre-hook", "set p.grad to ones"),
        Do("a forward that fails, caught"),
        *PASS,
    ),
    "a forward that fails leaves unsharded parameters in memory of the user's": (
        Arm("in a pre-hook", "replace p.data"),
        Do("a forward that fails, caught"),
        *PASS,
    ),
    "a gradient that is set in a recompute is added to the one before": (
        Do("set p.grad to ones", 1),
        Arm("in a recompute", "set p.grad to ones", 1),
        *PASS,
    ),
    "fairscale's modules show views of what the parameter was": (
        *PASS,
        Arm("inside a forward", "replace p.data, keep the old one"),
        Evaluate(),
    ),
    "a conversion that is undone has converted the gradient of a parameter of which a rank holds nothing": (
        Do("a complete forward and backward"),
        Do("convert the model"),
        Evaluate(),
        Do("convert the model"),
        *PASS,
    ),
    "an optimizer steps inside an evaluation": (*PASS, Arm("in a pre-hook", "optimizer.step()"), Evaluate()),
    "a parameter is replaced, and each forward refuses it": (Do("replace a parameter"), Forward(9), Forward(9)),
    "an optimizer steps inside a forward whose outputs nobody trains by": (
        *PASS,
        Arm("in a pre-hook", "optimizer.step()"),
        Forward(9),
    ),
    "a training step inside a forward, with state of the optimizer that was loaded": (
        *PASS,
        Step(),
        Arm("in a pre-hook", "save and load the optimizer's state"),
        Arm("in a pre-hook", "a complete forward and backward"),
        *PASS,
    ),
    "p.data of a forward that fails, where the unsharded parameters are the shards": (
        Arm("in a pre-hook", "replace p.data"),
        Do("a forward that fails, caught"),
        Evaluate(),
    ),
    "a kept gradient is scaled through .data, on one rank": (
        *KEPT,
        Do("scale p.grad.data in place"),
        *PASS,
    ),
    "a kept gradient and a reduced one are scaled through .data": (
        *PASS,
        *KEPT,
        Do("scale p.grad.data in place"),
        *PASS,
    ),
    "a model is converted under no_sync, by FSDP1's names": (Sync(False), Do("convert the model"), Sync(True), *PASS),
    "a forward inside a forward fails, whose pre-hook has replaced p.data": (
        Do("replace p.data, evaluate, put it back", 1),
        Arm("in a pre-hook", "replace p.data, evaluate, put it back"),
        *([Forward(9)] * 3),
    ),
    "a step in a forward in which a gradient was set, which its end refuses": (
        *PASS,
        Step(),
        Arm("in a pre-hook", "set p.grad to ones"),
        Arm("in a pre-hook", "optimizer.step()"),
        *PASS,
    ),
    "a step between a forward and its backward, under no_sync, of a parameter of which a rank holds nothing": (
        *PASS,
        Step(),
        Zero(),
        Sync(False),
        Do("set p.grad to ones"),
        Forward(6),
        Step(),
        Backward(6),
    ),
    "a hook of a backward inside a forward changes what the modules show": (
        Arm("in a pre-hook", "a complete forward and backward"),
        Arm("in a tensor hook", "change a weight in place"),
        *PASS,
    ),
    "the model is frozen in a recompute, after a gradient of the root has arrived, and called": (
        Arm("in a recompute", "freeze the model"),
        Arm("in a recompute", "a forward whose output is dropped"),
        *PASS,
    ),
    "shards are loaded into a module that was put in": (
        Do("keep a copy of the state dict"),
        Do("replace a module inside a unit"),
        Do("load a part of the kept state dict"),
    ),
    "a recompute that fails keeps what it did to a unit whose forward is over": (
        Arm("in a recompute", "call the model frozen, thaw it"),
        Arm("in a recompute", "replace p.data"),
        *PASS,
    ),
    "data is replaced in a recompute after an evaluation of the model": (
        Arm("in a recompute", "evaluate the model"),
        Arm("in a recompute", "replace p.data"),
        *PASS,
    ),
    "a hook of a backward inside a forward freezes a parameter": (
        Arm("in a tensor hook", "freeze a parameter"),
        Arm("in a pre-hook", "a complete forward and backward"),
        Forward(9),
    ),
    "a recompute thaws units that the backward has entered, and one that was frozen when it began": (
        Arm("in a recompute", "thaw what was trained"),
        Forward(1),
        Do("freeze the model"),
        Backward(1),
    ),
    "an evaluation inside a backward, after a weight of a unit that it has left was changed": (
        Arm("in a hook of an activation", "initialise a weight", 1),
        Arm("in a hook of an activation", "evaluate the model", 1),
        *PASS,
    ),
    "a recompute that an error of the engine ends keeps what it has changed": (
        Arm("in a recompute", "change a weight through .detach()", 1),
        Arm("in a recompute", "evaluate with the model frozen, and thaw it", 1),
        Forward(1),
        Do("replace a parameter"),
        Backward(1),
    ),
    "a model in which a module was replaced is converted, by FSDP2's names": (
        Do("replace a module inside a unit"),
        Do("convert the model"),
        *PASS,
    ),
    "a model in which a module was replaced is copied": (
        Do("replace a module inside a unit"),
        Do("deepcopy the model, and evaluate the copy"),
    ),
}
"""Programs that were found, and are right since."""
WORLDS = {
    "a forward in a recompute calls units that are frozen for it": ("FULL_SHARD", 1),
    "a recompute thaws a unit that comes later in the backward": ("FULL_SHARD", 1),
    "a gradient that is set in a recompute is added to the one before": ("FULL_SHARD", 1),
    "fairscale's modules show views of what the parameter was": ("fairscale", 2),
    "a parameter is replaced, and each forward refuses it": ("fully_shard", 2),
    "p.data of a forward that fails, where the unsharded parameters are the shards": ("ddp", 2),
    "a kept gradient is scaled through .data, on one rank": ("FULL_SHARD", 1),
    "a kept gradient and a reduced one are scaled through .data": ("fully_shard", 2),
    "a model is converted under no_sync, by FSDP1's names": ("torch_fsdp", 2),
    "an evaluation inside a backward, after a weight of a unit that it has left was changed": ("SHARD_GRADIENTS", 1),
    "a model in which a module was replaced is converted, by FSDP2's names": ("fully_shard", 2),
    "a forward inside a forward fails, whose pre-hook has replaced p.data": ("fully_shard", 2),
    "a step between a forward and its backward, under no_sync, of a parameter of which a rank holds nothing": ("FULL_SHARD", 3),
}
"""Where a program was found, if not with "FULL_SHARD" on two ranks."""


@pytest.mark.parametrize("found", FOUND)
def test_a_program_that_was_found(found: str) -> None:
    check([*FOUND[found], *LATER], *WORLDS.get(found, ("FULL_SHARD", 2)), 0)


def test_random_programs_are_right_or_refused() -> None:
    run_state_machine_as_test(
        ActsAtAnyMoment,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=MOVES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
