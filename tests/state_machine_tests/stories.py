"""What must be possible and what must be refused, told event by event.

    EVENT -> STATE: ACTIONS      moves there, and asks the engine for exactly these actions in this order
    EVENT: refused               raises IllegalTransition and stays

A story is told to a unit of every strategy, unless it says which; to one that never reshards, with `KEEP_UNSHARDED`
for `RESHARD` where all goes well. Every row is used, and every missing pair refused,
by some story: a new row needs a story first.
"""

from typing import NamedTuple

from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.table import ReshardPolicy
from state_machine.vocabulary import Event, State

AFTER_FORWARD, AFTER_BACKWARD, NEVER = ReshardPolicy
GOES_WELL = (
    "POST_FORWARD",
    "POST_FORWARD_NO_GRAD",
    "POST_BACKWARD",
    "POST_BACKWARD_NO_SYNC",
    "INPUT_GRADS_DONE",
    "FINAL_CALLBACK",
    "FINAL_CALLBACK_NO_SYNC",
)
"""Where the third strategy keeps what a story frees."""


class Story(NamedTuple):
    """A way a unit goes."""

    name: str
    text: str
    strategies: tuple[ReshardPolicy, ...] = (AFTER_FORWARD, AFTER_BACKWARD, NEVER)


STORIES = (
    Story(
        "a training step frees the parameters between forward and backward",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD -> IDLE: HOOK_OUTPUTS, RESHARD
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
        (AFTER_FORWARD,),
    ),
    Story(
        "the keep strategy shows the shards again but keeps the memory for the backward",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD -> IDLE: HOOK_OUTPUTS, KEEP_UNSHARDED
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
        (AFTER_BACKWARD, NEVER),
    ),
    Story(
        "an evaluation keeps nothing, whatever the strategy",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        """,
    ),
    Story(
        "several forwards, then several backwards, each gathers again",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD -> IDLE: HOOK_OUTPUTS, RESHARD
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD -> IDLE: HOOK_OUTPUTS, RESHARD
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
        (AFTER_FORWARD,),
    ),
    Story(
        "a kept copy outlives a second forward",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD -> IDLE: HOOK_OUTPUTS, KEEP_UNSHARDED
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD -> IDLE: HOOK_OUTPUTS, KEEP_UNSHARDED
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
        (AFTER_BACKWARD, NEVER),
    ),
    Story(
        "several outputs announce the backward several times",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        """,
    ),
    Story(
        "a unit whose output did not reach the loss still speaks to its peers",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        FINAL_CALLBACK_NO_SYNC -> IDLE: RESHARD
        """,
    ),
    Story(
        "an unused parameter: complete never comes, and what did arrive is flushed",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a gradient comes by a path no hook could see",
        """
        GRAD_ACCUMULATED -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "reentrant checkpointing: the replay is the first the backward hears of it",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        PRE_RECOMPUTE -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        POST_RECOMPUTE -> BACKWARD_PRE: HOOK_OUTPUTS
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "non-reentrant checkpointing: the replay comes after the backward did, and may be stopped early",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        PRE_RECOMPUTE -> BACKWARD_PRE: UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        PRE_RECOMPUTE -> BACKWARD_PRE: UNSHARD
        POST_RECOMPUTE -> BACKWARD_PRE: HOOK_OUTPUTS
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "several checkpoints around one unit: done, and used again in the same backward",
        """
        PRE_RECOMPUTE -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        POST_RECOMPUTE -> BACKWARD_PRE: HOOK_OUTPUTS
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        PRE_RECOMPUTE -> BACKWARD_PRE: UNSHARD
        POST_RECOMPUTE -> BACKWARD_PRE: HOOK_OUTPUTS
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        GRAD_ACCUMULATED -> BACKWARD_POST:
        POST_BACKWARD -> BACKWARD_POST: REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a frozen unit is done when its inputs' gradients are, as often as it was called",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        INPUT_GRADS_DONE -> BACKWARD_POST: RESHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        INPUT_GRADS_DONE -> BACKWARD_POST: RESHARD
        INPUT_GRADS_DONE -> BACKWARD_POST:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a frozen unit whose output is unused hears that its input has a gradient",
        """
        INPUT_GRADS_DONE -> IDLE:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "under no_sync the gradients are kept, and the next backward that synchronises reduces",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        POST_BACKWARD_NO_SYNC -> BACKWARD_POST: RESHARD
        POST_BACKWARD_NO_SYNC -> BACKWARD_POST:
        FINAL_CALLBACK_NO_SYNC -> IDLE: RESHARD, ACCUMULATE_UNSHARDED
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        FINAL_CALLBACK_NO_SYNC -> IDLE: RESHARD, ACCUMULATE_UNSHARDED
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "an exception passes through the forward, and the next step works",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        FORWARD_FAILED -> IDLE: RESHARD
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        """,
    ),
    Story(
        "a backward fails before, in and after the unit, and leaves nothing",
        """
        BACKWARD_FAILED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        BACKWARD_FAILED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        BACKWARD_FAILED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        """,
    ),
    Story(
        "a loan is returned with its changes, or discarded",
        """
        SUMMON -> SUMMONED: RESHARD, GATHER_FULL
        UNSUMMON_WRITEBACK -> IDLE: WRITE_BACK, FREE_FULL
        SUMMON -> SUMMONED: RESHARD, GATHER_FULL
        UNSUMMON_DISCARD -> IDLE: FREE_FULL
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        """,
    ),
    Story(
        "an evaluation on lent parameters computes with what the user sees",
        """
        SUMMON -> SUMMONED: RESHARD, GATHER_FULL
        PRE_FORWARD -> SUMMONED:
        POST_FORWARD_NO_GRAD -> SUMMONED:
        PRE_FORWARD -> SUMMONED:
        FORWARD_FAILED -> SUMMONED:
        UNSUMMON_WRITEBACK -> IDLE: WRITE_BACK, FREE_FULL
        """,
    ),
    Story(
        "lent parameters cannot be trained",
        """
        SUMMON -> SUMMONED: RESHARD, GATHER_FULL
        PRE_FORWARD -> SUMMONED:
        POST_FORWARD: refused
        PRE_BACKWARD: refused
        PRE_RECOMPUTE: refused
        POST_RECOMPUTE: refused
        GRAD_ACCUMULATED: refused
        POST_BACKWARD: refused
        POST_BACKWARD_NO_SYNC: refused
        SUMMON: refused
        UNSUMMON_DISCARD -> IDLE: FREE_FULL
        """,
    ),
    Story(
        "other units run a backward while this one is lent",
        """
        SUMMON -> SUMMONED: RESHARD, GATHER_FULL
        INPUT_GRADS_DONE -> SUMMONED:
        FINAL_CALLBACK -> SUMMONED: FLUSH_GRADS, COMMIT
        FINAL_CALLBACK_NO_SYNC -> SUMMONED:
        BACKWARD_FAILED -> SUMMONED: WAIT_REDUCTIONS, DROP_GRADS
        UNSUMMON_WRITEBACK -> IDLE: WRITE_BACK, FREE_FULL
        """,
    ),
    Story(
        "a step abandoned during a loan ends the loan; giving it back afterwards is harmless",
        """
        SUMMON -> SUMMONED: RESHARD, GATHER_FULL
        STEP_ABANDONED -> IDLE: WAIT_REDUCTIONS, FREE_FULL, RESHARD, DROP_GRADS
        UNSUMMON_WRITEBACK -> IDLE:
        SUMMON -> SUMMONED: RESHARD, GATHER_FULL
        STEP_ABANDONED -> IDLE: WAIT_REDUCTIONS, FREE_FULL, RESHARD, DROP_GRADS
        UNSUMMON_DISCARD -> IDLE:
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        """,
    ),
    Story(
        "a backward inside the forward: whole all through it, reduced and committed at its end",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        PRE_BACKWARD -> FORWARD: JOIN_BACKWARD
        GRAD_ACCUMULATED -> FORWARD: JOIN_BACKWARD
        POST_BACKWARD -> FORWARD: REDUCE_GRADS
        FINAL_CALLBACK -> FORWARD: INTERCEPT_READS, FLUSH_GRADS, COMMIT
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        """,
    ),
    Story(
        "a backward inside the forward replays it, leaves it, keeps its gradients",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        PRE_RECOMPUTE -> FORWARD: JOIN_BACKWARD
        POST_RECOMPUTE -> FORWARD: HOOK_OUTPUTS
        POST_BACKWARD_NO_SYNC -> FORWARD:
        INPUT_GRADS_DONE -> FORWARD:
        FINAL_CALLBACK_NO_SYNC -> FORWARD: ACCUMULATE_UNSHARDED
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        """,
    ),
    Story(
        "a backward inside the forward fails, and the forward catches it and goes on",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        GRAD_ACCUMULATED -> FORWARD: JOIN_BACKWARD
        POST_BACKWARD -> FORWARD: REDUCE_GRADS
        BACKWARD_FAILED -> FORWARD: WAIT_REDUCTIONS, DROP_GRADS
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        """,
    ),
    Story(
        "a backward inside the forward fails, and its exception passes through the forward before we hear of it",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        POST_BACKWARD -> FORWARD: REDUCE_GRADS
        FORWARD_FAILED -> IDLE: RESHARD
        BACKWARD_FAILED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        """,
    ),
    Story(
        "a penalty on its weights, computed outside, before and after the backward comes here",
        """
        EXTERNAL_GRAD -> BACKWARD_POST: JOIN_BACKWARD
        EXTERNAL_GRAD -> BACKWARD_POST:
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        EXTERNAL_GRAD -> BACKWARD_PRE:
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        EXTERNAL_GRAD -> BACKWARD_POST:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "the penalty alone, under no_sync: nothing is gathered",
        """
        EXTERNAL_GRAD -> BACKWARD_POST: JOIN_BACKWARD
        FINAL_CALLBACK_NO_SYNC -> IDLE: RESHARD, ACCUMULATE_UNSHARDED
        """,
    ),
    Story(
        "the penalty inside a forward, and no gradient for lent parameters",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        EXTERNAL_GRAD -> FORWARD: JOIN_BACKWARD
        FINAL_CALLBACK -> FORWARD: INTERCEPT_READS, FLUSH_GRADS, COMMIT
        POST_FORWARD_NO_GRAD -> IDLE: RESHARD
        SUMMON -> SUMMONED: RESHARD, GATHER_FULL
        EXTERNAL_GRAD: refused
        """,
    ),
    Story(
        "a step abandoned at rest",
        """
        STEP_ABANDONED -> IDLE: WAIT_REDUCTIONS, FREE_FULL, RESHARD, DROP_GRADS
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        """,
    ),
    Story(
        "a step abandoned in a forward, whose exception then passes through it",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        STEP_ABANDONED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        FORWARD_FAILED -> IDLE:
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        """,
    ),
    Story(
        "a step abandoned in a backward, before and after the gradients are complete",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        STEP_ABANDONED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        STEP_ABANDONED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        """,
    ),
    Story(
        "a forward abandoned by its user's exception cannot end as if it had not been",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        STEP_ABANDONED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        POST_FORWARD: refused
        POST_FORWARD_NO_GRAD: refused
        """,
    ),
    # what the training patterns (tests/patterns) go through besides
    Story(
        "penalties on the weights beside a loss: their gradients come before, between and after",
        """
        EXTERNAL_GRAD -> BACKWARD_POST: JOIN_BACKWARD
        GRAD_ACCUMULATED -> BACKWARD_POST:
        EXTERNAL_GRAD -> BACKWARD_POST:
        EXTERNAL_GRAD -> BACKWARD_POST:
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        EXTERNAL_GRAD -> BACKWARD_PRE:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "what a forward read of this unit after a backward of its own brings its gradient as if from outside",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        EXTERNAL_GRAD -> BACKWARD_PRE:
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a penalty alone is reduced without a gather",
        """
        EXTERNAL_GRAD -> BACKWARD_POST: JOIN_BACKWARD
        GRAD_ACCUMULATED -> BACKWARD_POST:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a frozen unit between trainable ones gives its parameters back as the backward passes",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        INPUT_GRADS_DONE -> BACKWARD_POST: RESHARD
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a unit that nobody sees being left (it has units inside, or is the first of the model) is done when the backward is",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "torch.autograd.grad brings no gradient; the backward behind a gradient penalty comes here again",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        POST_BACKWARD_NO_SYNC -> BACKWARD_POST: RESHARD
        FINAL_CALLBACK_NO_SYNC -> IDLE: RESHARD, ACCUMULATE_UNSHARDED
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        FINAL_CALLBACK_NO_SYNC -> IDLE: RESHARD, ACCUMULATE_UNSHARDED
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        FINAL_CALLBACK_NO_SYNC -> IDLE: RESHARD, ACCUMULATE_UNSHARDED
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        POST_BACKWARD_NO_SYNC -> BACKWARD_POST: RESHARD
        FINAL_CALLBACK_NO_SYNC -> IDLE: RESHARD, ACCUMULATE_UNSHARDED
        """,
    ),
    Story(
        "a gradient penalty through replays that read this unit's weight from another",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        EXTERNAL_GRAD -> BACKWARD_PRE:
        PRE_RECOMPUTE -> BACKWARD_PRE: UNSHARD
        POST_RECOMPUTE -> BACKWARD_PRE: HOOK_OUTPUTS
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        EXTERNAL_GRAD -> BACKWARD_PRE:
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        EXTERNAL_GRAD -> BACKWARD_PRE:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a replay of another unit reads this one's weight, which joins the backward at once; then it is replayed itself",
        """
        EXTERNAL_GRAD -> BACKWARD_POST: JOIN_BACKWARD
        PRE_RECOMPUTE -> BACKWARD_PRE: UNSHARD
        POST_RECOMPUTE -> BACKWARD_PRE: HOOK_OUTPUTS
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        EXTERNAL_GRAD -> BACKWARD_POST:
        GRAD_ACCUMULATED -> BACKWARD_POST:
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a unit called twice in one checkpoint is replayed twice; the second replay may be stopped early",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        PRE_RECOMPUTE -> BACKWARD_PRE: UNSHARD
        POST_RECOMPUTE -> BACKWARD_PRE: HOOK_OUTPUTS
        PRE_RECOMPUTE -> BACKWARD_PRE: UNSHARD
        PRE_BACKWARD -> BACKWARD_PRE: UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a gradient by a path no hook could see, and nothing else",
        """
        GRAD_ACCUMULATED -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        FINAL_CALLBACK -> IDLE: RESHARD, FLUSH_GRADS, COMMIT
        """,
    ),
    Story(
        "a backward fails, or the step is abandoned, when a gradient has come",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        BACKWARD_FAILED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        GRAD_ACCUMULATED -> BACKWARD_PRE:
        STEP_ABANDONED -> IDLE: WAIT_REDUCTIONS, RESHARD, DROP_GRADS
        """,
    ),
    *(
        Story(
            "two training steps inside one forward, and forces that are its output",
            f"""
            PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
            PRE_BACKWARD -> FORWARD: JOIN_BACKWARD
            FINAL_CALLBACK -> FORWARD: INTERCEPT_READS, FLUSH_GRADS, COMMIT
            PRE_BACKWARD -> FORWARD: JOIN_BACKWARD
            GRAD_ACCUMULATED -> FORWARD: JOIN_BACKWARD
            PRE_BACKWARD -> FORWARD: JOIN_BACKWARD
            FINAL_CALLBACK -> FORWARD: INTERCEPT_READS, FLUSH_GRADS, COMMIT
            POST_FORWARD -> IDLE: HOOK_OUTPUTS, {then}
            PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
            PRE_BACKWARD -> FORWARD: JOIN_BACKWARD
            FINAL_CALLBACK_NO_SYNC -> FORWARD: ACCUMULATE_UNSHARDED
            POST_FORWARD -> IDLE: HOOK_OUTPUTS, {then}
            """,
            (strategy,),
        )
        for strategy, then in ((AFTER_FORWARD, "RESHARD"), (AFTER_BACKWARD, "KEEP_UNSHARDED"), (NEVER, "KEEP_UNSHARDED"))
    ),
    Story(
        "a unit at rest refuses endings",
        """
        POST_FORWARD: refused
        POST_FORWARD_NO_GRAD: refused
        POST_RECOMPUTE: refused
        POST_BACKWARD: refused
        POST_BACKWARD_NO_SYNC: refused
        """,
    ),
    Story(
        "a unit in its forward refuses recursion and loans",
        """
        PRE_FORWARD -> FORWARD: DROP_STALE, UNSHARD
        PRE_FORWARD: refused
        SUMMON: refused
        UNSUMMON_WRITEBACK: refused
        UNSUMMON_DISCARD: refused
        """,
    ),
    Story(
        "a unit that a backward has reached refuses plain forwards and loans",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        PRE_FORWARD: refused
        POST_FORWARD: refused
        POST_FORWARD_NO_GRAD: refused
        FORWARD_FAILED: refused
        SUMMON: refused
        UNSUMMON_WRITEBACK: refused
        UNSUMMON_DISCARD: refused
        """,
    ),
    Story(
        "a unit that is done refuses plain forwards, loans and the end of a replay that never began",
        """
        PRE_BACKWARD -> BACKWARD_PRE: JOIN_BACKWARD, UNSHARD
        POST_BACKWARD -> BACKWARD_POST: RESHARD, REDUCE_GRADS
        PRE_FORWARD: refused
        POST_FORWARD: refused
        POST_FORWARD_NO_GRAD: refused
        FORWARD_FAILED: refused
        POST_RECOMPUTE: refused
        SUMMON: refused
        UNSUMMON_WRITEBACK: refused
        UNSUMMON_DISCARD: refused
        """,
    ),
)
TOLD = [(story, strategy) for story in STORIES for strategy in story.strategies]


def tell(story: Story, strategy: ReshardPolicy) -> list[tuple[State, Event, bool]]:
    """Play the story to a unit; return the pairs of state and event it went through, and which were refused."""
    unit = Lifecycle("layers.3", strategy)
    pairs = []
    for line in filter(None, (line.strip() for line in story.text.splitlines())):
        heard, _, answer = (part.strip() for part in line.partition(":"))
        name, _, to = (part.strip() for part in heard.partition("->"))
        before, event = unit.state, Event[name]
        pairs.append((before, event, answer == "refused"))
        if answer == "refused":
            try:
                unit.on(event)
            except IllegalTransition:
                assert unit.state is before, f"{line}: moved to {unit.state.name}"
                continue
            raise AssertionError(f"{line}: was not refused in {before.name}")
        if strategy is NEVER and name in GOES_WELL:
            answer = answer.replace("RESHARD", "KEEP_UNSHARDED")
        actions = ", ".join(action.name for action in unit.on(event))
        assert (unit.state.name, actions) == (to, answer), f"{line}: went to {unit.state.name} with {actions}"
    return pairs
