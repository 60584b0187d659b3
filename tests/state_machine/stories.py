"""What must be possible and what must be refused, told action by action.

    EVENT -> STATE: ACTIONS      moves there, and asks the engine for exactly these actions in this order
    EVENT: refused               raises IllegalTransition and stays

A story is told to a unit of every strategy, unless it says which; to one that always keeps with KEEP for FREE where
all goes well. Every row is used, and every missing pair refused,
by some story: a new row needs a story first.
"""

from typing import NamedTuple

from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.table import Strategy
from state_machine.vocabulary import Event, State

FREE, KEEP, ALWAYS = Strategy
GOES_WELL = (
    "FORWARD_ENDS",
    "INFERENCE_ENDS",
    "GRADIENTS_READY",
    "GRADIENTS_KEPT",
    "BACKWARD_LEFT",
    "BACKWARD_ENDS",
    "BACKWARD_ENDS_UNSYNCED",
)
"""Where the third strategy keeps what a story frees."""


class Story(NamedTuple):
    """A way a unit goes."""

    name: str
    text: str
    strategies: tuple[Strategy, ...] = (FREE, KEEP, ALWAYS)


STORIES = (
    Story(
        "a training step frees the parameters between forward and backward",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        FORWARD_ENDS -> IDLE: WATCH_OUTPUTS, FREE
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
        (FREE,),
    ),
    Story(
        "the keep strategy shows the shards again but keeps the memory for the backward",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        FORWARD_ENDS -> IDLE: WATCH_OUTPUTS, KEEP
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
        (KEEP, ALWAYS),
    ),
    Story(
        "an evaluation keeps nothing, whatever the strategy",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        INFERENCE_ENDS -> IDLE: FREE
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        INFERENCE_ENDS -> IDLE: FREE
        """,
    ),
    Story(
        "several forwards, then several backwards, each gathers again",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        FORWARD_ENDS -> IDLE: WATCH_OUTPUTS, FREE
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        FORWARD_ENDS -> IDLE: WATCH_OUTPUTS, FREE
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
        (FREE,),
    ),
    Story(
        "a kept copy outlives a second forward",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        FORWARD_ENDS -> IDLE: WATCH_OUTPUTS, KEEP
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        FORWARD_ENDS -> IDLE: WATCH_OUTPUTS, KEEP
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
        (KEEP, ALWAYS),
    ),
    Story(
        "several outputs announce the backward several times",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        """,
    ),
    Story(
        "a unit whose output did not reach the loss still speaks to its peers",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        INFERENCE_ENDS -> IDLE: FREE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        BACKWARD_ENDS_UNSYNCED -> IDLE: FREE
        """,
    ),
    Story(
        "an unused parameter: complete never comes, and what did arrive is flushed",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a gradient comes by a path no hook could see",
        """
        GRADIENT_ARRIVES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "reentrant checkpointing: the replay is the first the backward hears of it",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        INFERENCE_ENDS -> IDLE: FREE
        REPLAY_BEGINS -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        REPLAY_ENDS -> BACKWARD_PRE: WATCH_OUTPUTS
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "non-reentrant checkpointing: the replay comes after the backward did, and may be stopped early",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        REPLAY_BEGINS -> BACKWARD_PRE: NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        REPLAY_BEGINS -> BACKWARD_PRE: NEED
        REPLAY_ENDS -> BACKWARD_PRE: WATCH_OUTPUTS
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "several checkpoints around one unit: done, and used again in the same backward",
        """
        REPLAY_BEGINS -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        REPLAY_ENDS -> BACKWARD_PRE: WATCH_OUTPUTS
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        REPLAY_BEGINS -> BACKWARD_PRE: NEED
        REPLAY_ENDS -> BACKWARD_PRE: WATCH_OUTPUTS
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        GRADIENT_ARRIVES -> BACKWARD_POST:
        GRADIENTS_READY -> BACKWARD_POST: REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a frozen unit is done when its inputs' gradients are, as often as it was called",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_LEFT -> BACKWARD_POST: FREE
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        BACKWARD_LEFT -> BACKWARD_POST: FREE
        BACKWARD_LEFT -> BACKWARD_POST:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a frozen unit whose output is unused hears that its input has a gradient",
        """
        BACKWARD_LEFT -> IDLE:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "under no_sync the gradients are kept, and the next backward that synchronises reduces",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENTS_KEPT -> BACKWARD_POST: FREE
        GRADIENTS_KEPT -> BACKWARD_POST:
        BACKWARD_ENDS_UNSYNCED -> IDLE: FREE, STASH
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        BACKWARD_ENDS_UNSYNCED -> IDLE: FREE, STASH
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "an exception passes through the forward, and the next step works",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        FORWARD_FAILS -> IDLE: FREE
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        INFERENCE_ENDS -> IDLE: FREE
        """,
    ),
    Story(
        "a backward fails before, in and after the unit, and leaves nothing",
        """
        BACKWARD_FAILS -> IDLE: DRAIN, FREE, DROP
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_FAILS -> IDLE: DRAIN, FREE, DROP
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_FAILS -> IDLE: DRAIN, FREE, DROP
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        """,
    ),
    Story(
        "a loan is returned with its changes, or discarded",
        """
        SUMMONED -> SUMMONED: FREE, LEND
        RETURNED -> IDLE: WRITE_BACK, RECLAIM
        SUMMONED -> SUMMONED: FREE, LEND
        DISCARDED -> IDLE: RECLAIM
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        """,
    ),
    Story(
        "an evaluation on lent parameters computes with what the user sees",
        """
        SUMMONED -> SUMMONED: FREE, LEND
        FORWARD_BEGINS -> SUMMONED:
        INFERENCE_ENDS -> SUMMONED:
        FORWARD_BEGINS -> SUMMONED:
        FORWARD_FAILS -> SUMMONED:
        RETURNED -> IDLE: WRITE_BACK, RECLAIM
        """,
    ),
    Story(
        "lent parameters cannot be trained",
        """
        SUMMONED -> SUMMONED: FREE, LEND
        FORWARD_BEGINS -> SUMMONED:
        FORWARD_ENDS: refused
        BACKWARD_REACHES: refused
        REPLAY_BEGINS: refused
        REPLAY_ENDS: refused
        GRADIENT_ARRIVES: refused
        GRADIENTS_READY: refused
        GRADIENTS_KEPT: refused
        SUMMONED: refused
        DISCARDED -> IDLE: RECLAIM
        """,
    ),
    Story(
        "other units run a backward while this one is lent",
        """
        SUMMONED -> SUMMONED: FREE, LEND
        BACKWARD_LEFT -> SUMMONED:
        BACKWARD_ENDS -> SUMMONED: FLUSH, COMMIT
        BACKWARD_ENDS_UNSYNCED -> SUMMONED:
        BACKWARD_FAILS -> SUMMONED: DRAIN, DROP
        RETURNED -> IDLE: WRITE_BACK, RECLAIM
        """,
    ),
    Story(
        "a step abandoned during a loan ends the loan; giving it back afterwards is harmless",
        """
        SUMMONED -> SUMMONED: FREE, LEND
        STEP_ABANDONED -> IDLE: DRAIN, RECLAIM, FREE, DROP
        RETURNED -> IDLE:
        SUMMONED -> SUMMONED: FREE, LEND
        STEP_ABANDONED -> IDLE: DRAIN, RECLAIM, FREE, DROP
        DISCARDED -> IDLE:
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        """,
    ),
    Story(
        "a backward inside the forward: whole all through it, reduced and committed at its end",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        BACKWARD_REACHES -> FORWARD: JOIN_BACKWARD
        GRADIENT_ARRIVES -> FORWARD: JOIN_BACKWARD
        GRADIENTS_READY -> FORWARD: REDUCE
        BACKWARD_ENDS -> FORWARD: GUARD, FLUSH, COMMIT
        INFERENCE_ENDS -> IDLE: FREE
        """,
    ),
    Story(
        "a backward inside the forward replays it, leaves it, keeps its gradients",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        REPLAY_BEGINS -> FORWARD: JOIN_BACKWARD
        REPLAY_ENDS -> FORWARD: WATCH_OUTPUTS
        GRADIENTS_KEPT -> FORWARD:
        BACKWARD_LEFT -> FORWARD:
        BACKWARD_ENDS_UNSYNCED -> FORWARD: STASH
        INFERENCE_ENDS -> IDLE: FREE
        """,
    ),
    Story(
        "a backward inside the forward fails, and the forward catches it and goes on",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        GRADIENT_ARRIVES -> FORWARD: JOIN_BACKWARD
        GRADIENTS_READY -> FORWARD: REDUCE
        BACKWARD_FAILS -> FORWARD: DRAIN, DROP
        INFERENCE_ENDS -> IDLE: FREE
        """,
    ),
    Story(
        "a backward inside the forward fails, and its exception passes through the forward before we hear of it",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        GRADIENTS_READY -> FORWARD: REDUCE
        FORWARD_FAILS -> IDLE: FREE
        BACKWARD_FAILS -> IDLE: DRAIN, FREE, DROP
        """,
    ),
    Story(
        "a penalty on its weights, computed outside, before and after the backward comes here",
        """
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST: JOIN_BACKWARD
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST:
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENT_FROM_OUTSIDE -> BACKWARD_PRE:
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "the penalty alone, under no_sync: nothing is gathered",
        """
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST: JOIN_BACKWARD
        BACKWARD_ENDS_UNSYNCED -> IDLE: FREE, STASH
        """,
    ),
    Story(
        "the penalty inside a forward, and no gradient for lent parameters",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        GRADIENT_FROM_OUTSIDE -> FORWARD: JOIN_BACKWARD
        BACKWARD_ENDS -> FORWARD: GUARD, FLUSH, COMMIT
        INFERENCE_ENDS -> IDLE: FREE
        SUMMONED -> SUMMONED: FREE, LEND
        GRADIENT_FROM_OUTSIDE: refused
        """,
    ),
    Story(
        "a step abandoned at rest",
        """
        STEP_ABANDONED -> IDLE: DRAIN, RECLAIM, FREE, DROP
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        """,
    ),
    Story(
        "a step abandoned in a forward, whose exception then passes through it",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        STEP_ABANDONED -> IDLE: DRAIN, FREE, DROP
        FORWARD_FAILS -> IDLE:
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        """,
    ),
    Story(
        "a step abandoned in a backward, before and after the gradients are complete",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        STEP_ABANDONED -> IDLE: DRAIN, FREE, DROP
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        STEP_ABANDONED -> IDLE: DRAIN, FREE, DROP
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        """,
    ),
    Story(
        "a forward abandoned by its user's exception cannot end as if it had not been",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        STEP_ABANDONED -> IDLE: DRAIN, FREE, DROP
        FORWARD_ENDS: refused
        INFERENCE_ENDS: refused
        """,
    ),
    # what the training patterns (tests/patterns) go through besides
    Story(
        "penalties on the weights beside a loss: their gradients come before, between and after",
        """
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST: JOIN_BACKWARD
        GRADIENT_ARRIVES -> BACKWARD_POST:
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST:
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST:
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENT_FROM_OUTSIDE -> BACKWARD_PRE:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "what a forward read of this unit after a backward of its own brings its gradient as if from outside",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_FROM_OUTSIDE -> BACKWARD_PRE:
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a penalty alone is reduced without a gather",
        """
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST: JOIN_BACKWARD
        GRADIENT_ARRIVES -> BACKWARD_POST:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a frozen unit between trainable ones gives its parameters back as the backward passes",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_LEFT -> BACKWARD_POST: FREE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a unit that nobody sees being left (it has units inside, or is the first of the model) is done when the backward is",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "torch.autograd.grad brings no gradient; the backward behind a gradient penalty comes here again",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENTS_KEPT -> BACKWARD_POST: FREE
        BACKWARD_ENDS_UNSYNCED -> IDLE: FREE, STASH
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_ENDS_UNSYNCED -> IDLE: FREE, STASH
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        BACKWARD_ENDS_UNSYNCED -> IDLE: FREE, STASH
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENTS_KEPT -> BACKWARD_POST: FREE
        BACKWARD_ENDS_UNSYNCED -> IDLE: FREE, STASH
        """,
    ),
    Story(
        "a gradient penalty through replays that read this unit's weight from another",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENT_FROM_OUTSIDE -> BACKWARD_PRE:
        REPLAY_BEGINS -> BACKWARD_PRE: NEED
        REPLAY_ENDS -> BACKWARD_PRE: WATCH_OUTPUTS
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENT_FROM_OUTSIDE -> BACKWARD_PRE:
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENT_FROM_OUTSIDE -> BACKWARD_PRE:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a replay of another unit reads this one's weight, which joins the backward at once; then it is replayed itself",
        """
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST: JOIN_BACKWARD
        REPLAY_BEGINS -> BACKWARD_PRE: NEED
        REPLAY_ENDS -> BACKWARD_PRE: WATCH_OUTPUTS
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        GRADIENT_FROM_OUTSIDE -> BACKWARD_POST:
        GRADIENT_ARRIVES -> BACKWARD_POST:
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a unit called twice in one checkpoint is replayed twice; the second replay may be stopped early",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        REPLAY_BEGINS -> BACKWARD_PRE: NEED
        REPLAY_ENDS -> BACKWARD_PRE: WATCH_OUTPUTS
        REPLAY_BEGINS -> BACKWARD_PRE: NEED
        BACKWARD_REACHES -> BACKWARD_PRE: NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a gradient by a path no hook could see, and nothing else",
        """
        GRADIENT_ARRIVES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        BACKWARD_ENDS -> IDLE: FREE, FLUSH, COMMIT
        """,
    ),
    Story(
        "a backward fails, or the step is abandoned, when a gradient has come",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        BACKWARD_FAILS -> IDLE: DRAIN, FREE, DROP
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENT_ARRIVES -> BACKWARD_PRE:
        STEP_ABANDONED -> IDLE: DRAIN, FREE, DROP
        """,
    ),
    *(
        Story(
            "two training steps inside one forward, and forces that are its output",
            f"""
            FORWARD_BEGINS -> FORWARD: REFRESH, NEED
            BACKWARD_REACHES -> FORWARD: JOIN_BACKWARD
            BACKWARD_ENDS -> FORWARD: GUARD, FLUSH, COMMIT
            BACKWARD_REACHES -> FORWARD: JOIN_BACKWARD
            GRADIENT_ARRIVES -> FORWARD: JOIN_BACKWARD
            BACKWARD_REACHES -> FORWARD: JOIN_BACKWARD
            BACKWARD_ENDS -> FORWARD: GUARD, FLUSH, COMMIT
            FORWARD_ENDS -> IDLE: WATCH_OUTPUTS, {then}
            FORWARD_BEGINS -> FORWARD: REFRESH, NEED
            BACKWARD_REACHES -> FORWARD: JOIN_BACKWARD
            BACKWARD_ENDS_UNSYNCED -> FORWARD: STASH
            FORWARD_ENDS -> IDLE: WATCH_OUTPUTS, {then}
            """,
            (strategy,),
        )
        for strategy, then in ((FREE, "FREE"), (KEEP, "KEEP"), (ALWAYS, "KEEP"))
    ),
    Story(
        "a unit at rest refuses endings",
        """
        FORWARD_ENDS: refused
        INFERENCE_ENDS: refused
        REPLAY_ENDS: refused
        GRADIENTS_READY: refused
        GRADIENTS_KEPT: refused
        """,
    ),
    Story(
        "a unit in its forward refuses recursion and loans",
        """
        FORWARD_BEGINS -> FORWARD: REFRESH, NEED
        FORWARD_BEGINS: refused
        SUMMONED: refused
        RETURNED: refused
        DISCARDED: refused
        """,
    ),
    Story(
        "a unit that a backward has reached refuses plain forwards and loans",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        FORWARD_BEGINS: refused
        FORWARD_ENDS: refused
        INFERENCE_ENDS: refused
        FORWARD_FAILS: refused
        SUMMONED: refused
        RETURNED: refused
        DISCARDED: refused
        """,
    ),
    Story(
        "a unit that is done refuses plain forwards, loans and the end of a replay that never began",
        """
        BACKWARD_REACHES -> BACKWARD_PRE: JOIN_BACKWARD, NEED
        GRADIENTS_READY -> BACKWARD_POST: FREE, REDUCE
        FORWARD_BEGINS: refused
        FORWARD_ENDS: refused
        INFERENCE_ENDS: refused
        FORWARD_FAILS: refused
        REPLAY_ENDS: refused
        SUMMONED: refused
        RETURNED: refused
        DISCARDED: refused
        """,
    ),
)
TOLD = [(story, strategy) for story in STORIES for strategy in story.strategies]


def tell(story: Story, strategy: Strategy) -> list[tuple[State, Event, bool]]:
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
        if strategy is ALWAYS and name in GOES_WELL:
            answer = answer.replace("FREE", "KEEP")
        actions = ", ".join(action.name for action in unit.on(event))
        assert (unit.state.name, actions) == (to, answer), f"{line}: went to {unit.state.name} with {actions}"
    return pairs
