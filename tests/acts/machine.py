"""Random programs of moves and acts, as a Hypothesis state machine.

Rule 1: a rule only writes a move down. The teardown plays the program on simulated ranks, from beginning to end, then on a plain
        model. A simulated world runs one function on all ranks, so a world that waits for the next rule would need threads that
        wait for Hypothesis, and a rank that waits for ever would stop it. Written down, a program is a value: it is played again,
        cut and printed as it is, and the same program gives the same run.
Rule 2: a rule is not guarded by what plain torch would raise, since `trial.judge` knows it. Guards keep programs interesting, and
        leave out the pairs that `table.DIFFERS` and `table.UNSEEN` name.
"""

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.acts.doors import DOORS
from tests.acts.players import ACTIVATION, POST
from tests.acts.table import MOMENTS_OF_HOOKS, UNSEEN, differs, has_moment
from tests.acts.trial import Arm, Backward, Do, Evaluate, Forward, Move, Step, Sync, Undo, Zero, judge
from tests.acts.vocabulary import ACTS

GRAPHS = 2
"""At one time."""
LATER = (Sync(True), Zero(), Undo(), Forward(9), Backward(9), Step())
"""What every program ends with."""
BACKWARD = "a complete forward and backward"
INSIDE = ("in a pre-hook", "inside a forward")
HOOKS = ("in a tensor hook", "in a post-accumulate hook")
DETACHED = "change a weight through .detach()"
POST_HOOK = "add a post-accumulate hook"
ONE_MODULE = "evaluate one module"
STEP = "optimizer.step()"
ONES, CLIP = "set p.grad to ones", "clip the gradients"
FLAGS = {
    *("freeze a parameter", "freeze the model", "thaw what was trained", "train a frozen parameter"),
    *("freeze a parameter and thaw it", "evaluate with the model frozen, and thaw it", "call the model frozen, thaw it"),
}
INFERENCE = "evaluate in inference mode"
KEEP, PUT_BACK = "replace p.data, keep the old one", "put the kept p.data back"
MAKES = {"replace a buffer", "replace p.data", KEEP, "convert the model", "replace a parameter", "replace a module inside a unit"}
"""Acts whose tensors are inference tensors, which torch refuses later, if an evaluation in inference mode brings their moment."""
USES = {STEP, "add the gradient to a weight"}
"""Acts that change weights by gradients."""
OF_ALL_GRADIENTS = {
    *(STEP, CLIP, "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
    *("read which parameters have a gradient", "read the norm of every gradient"),
}
"""Acts that see more in a post-accumulate hook here than in plain torch, where gradients arrive one by one."""
acts = st.sampled_from(sorted(ACTS))
blocks = st.integers(0, 1)


class ActsAtAnyMoment(RuleBasedStateMachine):
    """A model that is trained, on which a user acts."""

    def __init__(self) -> None:
        super().__init__()
        self.door = ""
        self.size = 1
        self.order = 0
        self.program: list[Move] = []
        self.graphs: dict[int, bool] = {}
        """By slot, whether one of its backwards has come."""
        self.syncs = True
        self.keeps = False
        """Whether gradients are kept since a backward under `no_sync`."""
        self.stepped = True
        self.nests = self.looks = False
        """Whether a backward was armed inside a forward, and whether an act was armed that differs there, or is of `UNSEEN`."""
        self.goes_back = False
        """Whether an act with a backward was armed."""
        self.keeps_unsharded = self.puts_back = False
        """Whether an act was armed that may keep `.data` of an unsharded parameter, whose memory is released, or that puts kept
        `.data` back: to read what was kept ends the process, as limits.md says."""
        self.hooks = self.uses_in_hook = self.of_all_gradients = False
        """Whether an act was armed in a hook of a parameter, one of `USES` there, or `OF_ALL_GRADIENTS` after accumulation."""
        self.used: set[str] = set()
        """The acts of the program so far."""
        self.late = False
        """Whether something is set or armed that is different from plain torch where gradients are kept."""

    @initialize(door=st.sampled_from(list(DOORS)), size=st.sampled_from((2, 1, 3)), order=st.integers(0, 7), warm=st.booleans())
    def wrap(self, door: str, size: int, order: int, warm: bool) -> None:
        self.door, self.size, self.order = door, size, order
        if warm or door == "fairscale":  # as in fairscale, the first forward converts buffers to float32
            self.ordinary_step()

    @rule()
    def ordinary_step(self) -> None:
        self.program += [Forward(9), Backward(9), Step(), Zero()]
        self.stepped, self.keeps = True, not self.syncs

    @precondition(lambda self: len(self.graphs) < GRAPHS)
    @rule()
    def forward(self) -> None:
        slot = len(self.program)
        self.graphs[slot] = False
        self.program.append(Forward(slot))

    @precondition(lambda self: self.graphs)
    @rule(last=st.booleans(), retain=st.sampled_from((False, False, True)))
    def backward(self, last: bool, retain: bool) -> None:
        slot = list(self.graphs)[-1 if last else 0]
        self.graphs[slot] = True
        if not retain:
            del self.graphs[slot]
        self.program.append(Backward(slot, retain))
        self.stepped, self.keeps = False, not self.syncs

    @rule()
    def step(self) -> None:
        self.program.append(Step())
        self.stepped = True

    @rule()
    def zero(self) -> None:
        self.program.append(Zero())

    @rule()
    def evaluate(self) -> None:
        self.program.append(Evaluate())

    @rule(on=st.booleans())
    def sync(self, on: bool) -> None:
        if on or not self.late:
            self.program.append(Sync(on))
            self.keeps |= self.goes_back and not self.syncs
            self.syncs = on

    @rule(act=acts, block=blocks)
    def do(self, act: str, block: int) -> None:
        is_late = self.is_late(act) and (self.keeps or not self.syncs)
        is_late |= (self.keeps_unsharded and act == PUT_BACK) or self.clashes(act)
        if not is_late and not any(differs(act, moment, self.door, self.size) for moment in self.moments()):
            self.program.append(Do(act, block))
            self.used.add(act)
            self.late |= self.is_late(act)
            self.keeps |= act == BACKWARD and not self.syncs

    @rule(moment=st.sampled_from(MOMENTS_OF_HOOKS), act=acts, block=blocks)
    def arm(self, moment: str, act: str, block: int) -> None:
        known = differs(act, moment, self.door, self.size) or (act, moment) in UNSEEN
        # in a backward inside a forward, hooks of parameters are inside that forward
        nests = act == BACKWARD and moment in INSIDE
        looks = any(act == unseen for unseen, _ in UNSEEN) or (
            moment in HOOKS and (act == STEP or any(differs(act, inside, self.door, self.size) for inside in INSIDE))
        )
        known = known or (nests and self.looks) or (looks and self.nests)
        known = known or (self.is_late(act, moment) and (self.keeps or not self.syncs))
        # torch fails to detach a DTensor in inference mode, in which the act may come
        known = known or (self.door == "fully_shard" and act == DETACHED)
        known = known or (act == PUT_BACK and self.keeps_unsharded) or (act == KEEP and self.puts_back)
        known = known or self.clashes(act)
        # a forward inside a forward of the same unit fails there
        inside = (act == ONE_MODULE and moment in INSIDE) or (nests and self.hooks) or (moment in HOOKS and self.nests)
        known = known or (self.door == "fairscale" and inside)
        # its forward computes with views that it makes in the beginning: gradients of all come last, and not if frozen by then
        known = known or (self.door == "fairscale" and act in FLAGS and moment in ("in a recompute", ACTIVATION))
        # the plain player leaves out a backward that ranks refuse, with the gradients that an earlier hook has used
        known = known or (moment in HOOKS and (act in USES or self.uses_in_hook) and self.hooks)
        known = known or (moment == POST and act in OF_ALL_GRADIENTS and POST_HOOK in self.used)
        self.nests, self.looks = self.nests or nests, self.looks or looks
        if not known and has_moment(moment, self.door, self.size):
            self.program.append(Arm(moment, act, block))
            self.used.add(act)
            self.hooks |= moment in HOOKS
            self.uses_in_hook |= moment in HOOKS and act in USES
            self.of_all_gradients |= moment == POST and act in OF_ALL_GRADIENTS
            self.late |= self.is_late(act, moment)
            self.goes_back |= act == BACKWARD
            self.keeps_unsharded |= act == KEEP
            self.puts_back |= act == PUT_BACK

    @rule()
    def undo(self) -> None:
        self.program.append(Undo())
        self.late = False

    def is_late(self, act: str, moment: str = "") -> bool:
        """Whether an act, or what it sets, is different from plain torch where gradients are kept: hooks see their sum."""
        sums = act == POST_HOOK or (act == ONES and moment in HOOKS)
        return sums or differs(act, "between micro-batches", self.door, self.size)

    def clashes(self, act: str) -> bool:
        """Whether the programs leave out this act after those so far.

        A norm counts ones in the padding of fairscale's flat shards, as it does in fairscale. What is made inside an evaluation
        in inference mode ends a later pass in torch's error, of which the plain player learns nothing. And hooks of a parameter
        are called in the order in which they were added, here once all gradients of a bucket are there.
        """
        used = {act, *self.used}
        padding = self.door == "fairscale" and used >= {ONES, CLIP}
        return padding or (INFERENCE in used and bool(used & MAKES)) or (act == POST_HOOK and self.of_all_gradients)

    def moments(self) -> set[str]:
        """What the moment is called in the table. Several may come together."""
        found = {"before a forward"}
        if self.graphs:
            found.add("between forward and backward")
        if any(self.graphs.values()):
            found.add("between two backwards of one graph")
        if self.keeps or not self.syncs:
            found.add("between micro-batches")
        return found | {"after the step" if self.stepped else "after the backward"}

    def teardown(self) -> None:
        """Equal, or refused on all ranks by a sentence, and the next legal step is right."""
        if self.door:
            check([*self.program, *LATER], self.door, self.size, self.order)


def check(program: Sequence[Move], door: str, size: int, order: int) -> None:
    """Raises AssertionError with a line that plays the program again, where this module and tests.acts.trial are imported."""
    fault = judge(program, door, size, order).fault
    assert not fault, f"{fault}\ncheck([{', '.join(map(repr, program))}], {door!r}, {size}, {order})"
