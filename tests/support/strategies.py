"""Hypothesis strategies for unit trees and training programs. Only what plain torch allows is drawn."""

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

import fsdp
from tests.support.programs import (
    Backward,
    Clip,
    Drop,
    Evaluate,
    Fault,
    Forward,
    Program,
    Reload,
    Statement,
    Step,
    Summon,
    Toggle,
    Zero,
)
from tests.support.trees import (
    EDITS,
    KINDS,
    RETURNS,
    CallSpec,
    GroupSpec,
    LeafSpec,
    TreeSpec,
    below,
    first_parameter,
    parameters_of,
    walk,
)

COMMITTING = ("SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "NO_SHARD")
REDUCTIONS = (
    None,
    None,
    fsdp.ReductionPolicy(bucket_cap_mb=0.0001),
    fsdp.ReductionPolicy(bucket_cap_mb=1, first_bucket_mb=0.0001),
    fsdp.ReductionPolicy(at_end=True, deterministic=True),
    fsdp.ReductionPolicy(coalesce_cap_mb=1),
    fsdp.ReductionPolicy(coalesce_cap_mb=0.0002),
)
world_sizes = st.sampled_from((2, 1, 2, 3, 2, 4, 3, 8))


@st.composite
def leaves(draw: st.DrawFn, branching: bool) -> LeafSpec:
    kind = draw(st.sampled_from(("branch", *KINDS, *["branch"] * 5) if branching else tuple(KINDS)))
    names = tuple(KINDS[kind].shapes(1))
    frozen = draw(st.sampled_from(((), (), (), names, names[:1], names[1:])))
    if kind == "branch" and frozen:
        # the ranks must agree on whether the unit has anything to train
        frozen = names
    ranks = draw(st.sampled_from(((0,), (1,), (0, 2), (1, 2, 3), ()))) if branching and kind == "branch" else ()
    return LeafSpec(kind, ranks, draw(st.sampled_from(("", "out", "in"))), frozen)


@st.composite
def groups(draw: st.DrawFn, depth: int, branching: bool, outermost: bool = False) -> GroupSpec:
    part = leaves(branching) if depth <= 1 else st.one_of(leaves(branching), groups(depth - 1, branching))
    parts = tuple(draw(st.lists(part, min_size=1, max_size=3)))
    calls = []
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(parts) - 1))
        second = draw(st.sampled_from((None, None, *range(len(parts)))))
        chain = (first,) if second is None else (first, second)
        kind = draw(st.sampled_from(("", "", "", "replayed", "reentrant")))
        # torch refuses in-place edits of views a custom function made, and of one of several views
        last = parts[chain[-1]]
        views = isinstance(last, GroupSpec) and last.returns in ("view", "reshaped", "chunks")
        refused = isinstance(last, GroupSpec) and (last.returns == "chunks" or (views and kind == "reentrant"))
        edit = not refused and draw(st.booleans())
        calls.append(CallSpec(chain, kind, edit, draw(st.booleans()), draw(st.integers(0, 4)) == 4))
    own = False if outermost else draw(st.booleans())
    readable = [number for number, part in enumerate(parts) if first_parameter(part)]
    reads = draw(st.sampled_from((None, None, None, *readable)))
    returns = draw(st.sampled_from(tuple(RETURNS)))
    return GroupSpec(parts, tuple(calls), own, reads, returns, draw(st.sampled_from(("", "out", "in"))))


@st.composite
def trees(draw: st.DrawFn) -> TreeSpec:
    # ranks that use different parameters cannot always agree on how the reductions of two roots follow each other
    branching = draw(st.booleans())
    root = draw(groups(3, branching, outermost=True))
    modules = dict(walk(root))
    inner = [path for path in modules if path]
    several_roots = not branching and draw(st.integers(0, 7)) == 7
    chosen = draw(st.sampled_from(("all", "some", "some", "leaves")))
    units = [
        path
        for path in inner
        if (several_roots and path.count(".") == 1)
        or (draw(st.booleans()) if chosen == "some" else chosen == "all" or isinstance(modules[path], LeafSpec))
    ]
    by_hand = several_roots or draw(st.booleans())
    strategy = draw(st.sampled_from(("FULL_SHARD", "FULL_SHARD", *COMMITTING, "HYBRID_SHARD")))
    keeps = strategy in COMMITTING
    # a parameter without dimensions cannot be cut along one, and NO_SHARD cuts none
    has_scalars = any(isinstance(one, LeafSpec) and one.kind == "scalar" for one in modules.values())
    dtensors = strategy != "NO_SHARD" and not has_scalars and draw(st.integers(0, 3)) == 3
    reshard = draw(st.sampled_from((None, None, False) if keeps else (None, True, False)))
    options = (
        ("sharding_strategy", strategy),
        ("reshard_after_forward", reshard),
        ("prefetch", draw(st.integers(0, 2))),
        ("guard", draw(st.integers(0, 3)) == 3),
        ("reduction", draw(st.sampled_from(REDUCTIONS))),
        ("dtensors", dtensors),
    )
    ties = []
    by_kind: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path, one in modules.items():
        if isinstance(one, LeafSpec):
            by_kind.setdefault((one.kind, one.frozen), []).append(path)
    for alike in by_kind.values():
        same = all(_unit_of(path, units) == _unit_of(alike[0], units) for path in alike[:2])
        if len(alike) > 1 and (same or not by_hand) and draw(st.booleans()):
            ties.append((alike[0], alike[1]))
    tied = {path for tie in ties for path in tie}
    leaf_paths = [path for path in inner if isinstance(modules[path], LeafSpec)]
    edits = [(path, edit) for path, edit in _possible_edits(root) if path not in tied]
    return TreeSpec(
        root,
        tuple(units),
        by_hand,
        inner_wrapper=draw(st.booleans()),
        root_wrapper=draw(st.booleans()),
        several_roots=several_roots,
        ties=tuple(ties),
        options=options,
        replicas=draw(st.sampled_from((2, 3, 4))) if strategy == "HYBRID_SHARD" else 0,
        width=draw(st.sampled_from((3, 5, 1))),
        early_optimizer=not dtensors and draw(st.booleans()),
        feature=draw(st.sampled_from(("", "", *inner))),
        late_feature=draw(st.booleans()),
        hooked=draw(st.sampled_from(("", "", *leaf_paths))),
        edit=draw(st.sampled_from((None, None, None, None, *edits))),
    )


def _possible_edits(root: GroupSpec) -> Iterator[tuple[str, str]]:
    """Edits of weights that nothing else in a forward uses before or after. Replays repeat them."""
    paths = list(_uses(root, ""))
    for path in paths:
        if paths.count(path) == 1:
            yield from ((path, edit) for edit in EDITS)


def _uses(group: GroupSpec, path: str) -> Iterator[str]:
    """Every use of a leaf in a forward."""
    for call in group.calls:
        for number in call.parts if group.reads is None else (group.reads, *call.parts):
            part = group.parts[number]
            if isinstance(part, LeafSpec):
                yield below(path, number)
            elif number != group.reads:
                yield from _uses(part, below(path, number))


def _unit_of(path: str, units: list[str]) -> str:
    """The innermost unit a module lies in."""
    return max((unit for unit in units if path == unit or path.startswith(f"{unit}.")), key=len, default="")


@st.composite
def programs(draw: st.DrawFn, tree: TreeSpec) -> Program:
    """Rounds of some forwards and their backwards, in any order, with everything else in between.

    Weights and what is trainable change only while no graph waits for its backward, as plain torch demands.
    """
    modules = dict(walk(tree.root))
    leaves_of_tree = [path for path, one in modules.items() if isinstance(one, LeafSpec)]
    trainable = parameters_of(tree)
    program: list[Statement] = []
    live: list[int] = []
    kept = False

    def one_in(number: int) -> bool:
        return draw(st.integers(1, number)) == number

    def fault(*places: str) -> Fault:
        where = draw(st.sampled_from(places))
        paths = [path for path, one in modules.items() if where == "forward" or one.trap] or [""]
        return where, draw(st.sampled_from(paths)), draw(st.integers(0, 2))

    def forward(broken: Fault | None = None) -> Forward:
        use = draw(st.sampled_from(("both", "main", "aux")))
        return Forward(len(program), use, not one_in(5), draw(st.booleans()), broken)

    def penalties(names: list[str]) -> tuple[tuple[str, str], ...]:
        one = st.tuples(st.sampled_from(("norm", "squares")), st.sampled_from(names))
        return tuple(draw(st.lists(one, min_size=1, max_size=2)))

    def backward(slots: tuple[int, ...]) -> Backward:
        sync = tree.several_roots or not one_in(3)
        only = draw(st.sampled_from(("", "", "", "", "", "inputs", "grad")))
        retain = one_in(5)
        # an edit that is repeated in the forward is not the same after it
        broken = fault("backward", *(() if tree.edit else ("forward",))) if one_in(5) else None
        of = draw(st.sampled_from(("loss", "loss", "both", "features"))) if tree.feature else "loss"
        # the replays of two backwards would edit what the first has saved for the second
        slope = not tree.reentrant and not (tree.edit and tree.checkpoints) and one_in(4)
        return Backward(slots, retain, sync, only, broken, of, slope, penalties(list(trainable)) if one_in(4) else ())

    def toggle() -> Toggle:
        statement = Toggle(draw(st.sampled_from(leaves_of_tree)), draw(st.booleans()))
        path = {other: one for one, other in tree.ties}.get(statement.path, statement.path)
        trainable.update((name, statement.trainable) for name in trainable if name.startswith(f"{path}."))
        return statement

    for _ in range(draw(st.integers(1, 4))):
        match draw(st.sampled_from(("", "", "toggle", "summon", "reload", "zero", "penalise", "evaluate"))):
            case "toggle" if not kept:
                program.append(toggle())
            case "penalise" if any(trainable.values()):
                sync = tree.several_roots or not one_in(3)
                names = [name for name, one in trainable.items() if one]
                program.append(Backward((), sync=sync, penalties=penalties(names)))
                kept = not sync
            case "evaluate":
                program.append(Evaluate(draw(st.sampled_from(("no_grad", "eval", "inference")))))
            case "summon":
                program.append(Summon(draw(st.booleans())))
            case "reload":
                program.append(Reload())
            case "zero":
                # what a rank keeps of a branch that only its peers took cannot be seen there as zeros
                program.append(Zero(True if kept and tree.branching else draw(st.booleans())))
                kept = False
        # the second forward would edit what the first has saved for its backward
        for _ in range(1 if tree.edit else draw(st.integers(1, 3))):
            live.append(len(program))
            program.append(forward())
        while live:
            match draw(st.sampled_from(("backward", "backward", "backward", "drop", "evaluate", "fail", "zero"))):
                case "backward":
                    order = draw(st.permutations(live))
                    statement = backward(tuple(order[: draw(st.integers(1, len(order)))]))
                    program.append(statement)
                    # after a failure the graph may be gone: nothing of it is used again
                    if not statement.retain or statement.fault is not None:
                        live = [slot for slot in live if slot not in statement.slots]
                    kept = not statement.sync or (kept and bool(statement.fault or statement.only))
                case "drop":
                    program.append(Drop(live.pop(draw(st.integers(0, len(live) - 1)))))
                case "evaluate" if not tree.edit:
                    program.append(Evaluate(draw(st.sampled_from(("no_grad", "eval", "inference")))))
                case "fail" if not tree.edit:
                    program.append(forward(fault("forward")))
                    if draw(st.booleans()):
                        live.clear()
                case "zero":
                    program.append(Zero(True if kept and tree.branching else draw(st.booleans())))
                    kept = False
        if not kept and draw(st.booleans()):
            program.append(Clip(draw(st.sampled_from((0.1, 10.0))), draw(st.sampled_from((2.0, float("inf"), 1.0)))))
        if not kept and not one_in(3):
            program.append(Step())
    return tuple(program)


@st.composite
def uneven(draw: st.DrawFn) -> tuple[TreeSpec, Program]:
    """A tree with `uneven_paths`, of whose calls each rank takes some, and a program for it.

    Nothing fails in it, and no rank asks for what another one may not have: a feature that a module left.
    """
    tree = draw(trees().filter(lambda tree: not tree.several_roots))
    options = (*tree.options, ("uneven_paths", True))
    tree = replace(tree, root=_optional(tree.root), options=options, uneven=True, feature="", edit=None)
    statements = (replace(one, fault=None) if isinstance(one, Forward | Backward) else one for one in draw(programs(tree)))
    return tree, tuple(statements)


def _optional(group: GroupSpec) -> GroupSpec:
    """The same with a choice in every call but the first, which a reentrant checkpoint needs to have a gradient."""
    parts = tuple(_optional(part) if isinstance(part, GroupSpec) else part for part in group.parts)
    calls = tuple(replace(call, optional=call.optional or number > 0) for number, call in enumerate(group.calls))
    return replace(group, parts=parts, calls=calls)
