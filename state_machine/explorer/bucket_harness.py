"""One or two ranks that reduce their buckets in backwards: the possible moves, a minimal reducer, and the invariants.

The moves are listed as permissions. In a backward that synchronises:

* Every rank reaches the same *shared* events in the same order, at its own pace: a unit is gathered, which waits for all ranks;
  a gathered unit is done; a parameter is used outside its unit; a gradient arrives from a stored parameter outside its unit; the
  backward is over. With `apart` each rank gathers units of its own choice (without waiting) and is done with them.
* Once a parameter of a unit was used outside it, gradients of it arrive at any moment, on some ranks or on none.
* While a unit is gathered and not done, gradients arrive at its buckets, on some ranks or on none. Those of an early bucket
  complete it at any moment or never. A frozen bucket gets none.
* A rank waits for a collective until every rank has launched it. Nothing else blocks.
* At rest, a backward under `no_sync` accumulates a gradient of any bucket on any rank.
* Every step that can fail may fail (`breakage`); then all ranks abandon the step.

The next step of a rank depends on its own past and on results of collectives, never on the progress of its peers. So it is
enough to advance the rank that is furthest behind among those that do not wait: in any other order the same ranks end up
waiting.
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from state_machine.bucket import CHECKED, BucketAction, BucketEvent, BucketKind, BucketState, UnitEvent
from state_machine.bucket_queue import BucketQueue
from state_machine.explorer.invariants import Violation

A, E = BucketAction, BucketEvent


class Part(NamedTuple):
    """One bucket of a scene."""

    unit: int
    kind: BucketKind
    frozen: bool = False


class Scene(NamedTuple):
    """Buckets, and the ranks that reduce them."""

    name: str
    parts: tuple[Part, ...]
    groups: tuple[tuple[int, ...], ...]
    """In the agreed order."""
    ranks: int = 2
    lanes: int = 1
    gathers: bool = True
    """An all-gather waits for all ranks."""
    at_once: bool = False
    """The shard group has one rank: gradients leave the memory of their buckets at the launch."""
    apart: bool = False
    """Ranks use units of their own choice (`find_unused_parameters`)."""
    outside: bool = True
    """Gradients also come from uses outside a unit."""
    more: bool = True
    """A bucket gets more than one gradient."""
    no_sync: bool = False
    """Backwards also run under `no_sync`."""
    breakage: bool = False
    """Every step that can fail may fail."""
    bare: int = 0
    """The number of units without a bucket."""

    @property
    def units(self) -> int:
        return 1 + max(part.unit for part in self.parts) + self.bare


class What(Enum):
    """The kinds of moves."""

    BACKWARD_BEGINS = auto()
    NO_SYNC_KEEPS = auto()
    UNIT_GATHERED = auto()
    UNIT_DONE = auto()
    USED_OUTSIDE = auto()
    UNUSED = auto()
    GRADIENT = auto()
    LAST_GRADIENT = auto()
    STORED_GRADIENT = auto()
    BACKWARD_OVER = auto()
    FAILS = auto()
    GOES_ON = auto()


class Move(NamedTuple):
    """One step of one rank."""

    what: What
    rank: int = 0
    of: int = 0
    """The unit or the bucket."""


SHARED: Final = (What.UNIT_GATHERED, What.UNIT_DONE, What.USED_OUTSIDE, What.STORED_GRADIENT, What.BACKWARD_OVER)
NOT_EARLY: Final = (BucketKind.ORDINARY, BucketKind.BEHIND_EARLY)
MAY_FAIL: Final = ("gather", "launch", "land", "take stock", "answer", "answers")
Todo = tuple[Any, ...]


class Rank:
    """The gradients of one rank, and its next steps."""

    def __init__(self, scene: Scene) -> None:
        parts = scene.parts
        names = [f"unit {part.unit}" for part in parts]
        self.queue = BucketQueue(names, [part.unit for part in parts], [part.kind for part in parts], scene.units)
        self.queue.agree_on(scene.groups)
        self.kept = (False,) * len(parts)
        """For each bucket: whether a gradient of an earlier backward is accumulated here."""
        self.outside: frozenset[int] = frozenset()
        """The units of which a parameter was used outside them, in this backward or before."""
        self.rest()

    def rest(self) -> None:
        """Reset the rank: no backward runs."""
        count = len(self.kept)
        self.queue.begin()
        self.here = self.came = self.complete = self.launched = self.result = (False,) * count
        """By bucket: a gradient came that was not launched; any came; all that it waits for came; it was launched; a result is
        here."""
        self.open: frozenset[int] = frozenset()
        """The units that are gathered and not done."""
        self.todo: tuple[Todo, ...] = ()
        self.in_flight: tuple[tuple[int, tuple[int, ...]], ...] = ()
        """The reductions in flight: the number of the collective, and its buckets."""
        self.sent: tuple[tuple[tuple[int, ...], bool], ...] = ()
        """The reductions that were launched."""
        self.gathered: tuple[int, ...] = ()
        """The units that were gathered."""
        self.said: tuple[tuple[bool, ...], tuple[bool, ...]] | None = None
        """The buckets that had a gradient here, and those with a remainder, as sent to all ranks."""
        self.flushed = 0
        self.committed: tuple[int, ...] = ()
        self.position = 0
        """The number of shared events that it has reached."""
        self.running = False

    def freeze(self) -> Any:
        """Return everything, hashable."""
        queue = self.queue
        return (
            tuple(queue._states),
            tuple(queue._unit_states),
            tuple(queue._missing),
            queue._turn,
            (self.kept, self.here, self.came, self.complete, self.launched, self.result, self.open, self.todo, self.in_flight),
            (self.sent, self.gathered, self.said, self.flushed, self.committed, self.position, self.running, self.outside),
        )

    def restore(self, frozen: Any) -> None:
        """Restore what `freeze` returned."""
        states, units, missing, self.queue._turn, own, shared = frozen
        self.queue._states = list(states)
        self.queue._unit_states = list(units)
        self.queue._missing = list(missing)
        self.kept, self.here, self.came, self.complete, self.launched, self.result, self.open, self.todo, self.in_flight = own
        self.sent, self.gathered, self.said, self.flushed, self.committed, self.position, self.running, self.outside = shared


def changed(flags: tuple[bool, ...], number: int, value: bool) -> tuple[bool, ...]:
    """Return the flags with one of them set to `value`."""
    return (*flags[:number], value, *flags[number + 1 :])


class BucketHarness:
    """The ranks of a scene. Raises Violation as soon as an invariant is violated."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.numbers = range(len(scene.parts))
        self.ranks = tuple(Rank(scene) for _ in range(scene.ranks))
        self.script: tuple[tuple[What, int], ...] = ()
        """The shared events that some rank has reached."""
        self.used: set[tuple[BucketKind, BucketState, BucketEvent]] = set()
        """The rows that were used."""

    def freeze(self) -> Any:
        """Return everything that the next moves depend on, hashable. They do not depend on what all ranks have passed."""
        ranks = self.ranks
        if events := min([rank.position for rank in ranks]):
            self.script = self.script[events:]
            for rank in ranks:
                rank.position -= events
        if gathers := min([len(rank.gathered) for rank in ranks]):
            for rank in ranks:
                rank.gathered = rank.gathered[gathers:]
                rank.todo = tuple(("gather", max(-1, one[1] - gathers)) if one[0] == "gather" else one for one in rank.todo)
        if sends := min([len(rank.sent) for rank in ranks]):
            for rank in ranks:
                rank.sent = rank.sent[sends:]
                rank.in_flight = tuple((max(-1, number - sends), buckets) for number, buckets in rank.in_flight)
        return (self.script, tuple(rank.freeze() for rank in ranks))

    def restore(self, frozen: Any) -> None:
        """Restore what `freeze` returned."""
        self.script, ranks = frozen
        for rank, one in zip(self.ranks, ranks, strict=True):
            rank.restore(one)

    # the possible moves

    def moves(self) -> Iterator[Move]:
        """Yield every move that is legal now.

        Raises:
            Violation: a deadlock.
        """
        if not any(rank.running for rank in self.ranks):
            yield Move(What.BACKWARD_BEGINS)
            if not self.scene.no_sync:
                return
            for index, rank in enumerate(self.ranks):
                for number in self.numbers:
                    if not rank.kept[number] and not self.scene.parts[number].frozen:
                        yield Move(What.NO_SYNC_KEEPS, index, number)
            return
        free = [index for index, rank in enumerate(self.ranks) if rank.running and not self.waits(rank)]
        if free:
            index = min(free, key=lambda one: self.ranks[one].position)
            rank = self.ranks[index]
            if rank.todo:
                yield Move(What.GOES_ON, index)
                if self.scene.breakage and rank.todo[0][0] in MAY_FAIL:
                    yield Move(What.FAILS, index)
            else:
                yield from self._choices(index, rank)
            return
        waiting = ", ".join(f"rank {index} in {rank.todo[0][0]}" for index, rank in enumerate(self.ranks) if rank.running)
        raise Violation(f"a deadlock: {waiting}")

    def _choices(self, index: int, rank: Rank) -> Iterator[Move]:
        apart, parts = self.scene.apart, self.scene.parts
        for number in self.numbers:
            unit = parts[number].unit
            used_outside = unit in rank.outside
            if (unit in rank.open or used_outside) and not parts[number].frozen:
                if not rank.here[number] and (self.scene.more or used_outside):
                    yield Move(What.GRADIENT, index, number)
                if unit in rank.open and not rank.complete[number] and parts[number].kind not in NOT_EARLY:
                    yield Move(What.LAST_GRADIENT, index, number)
        if apart:
            yield from self._gathers(index, rank)
            yield Move(What.BACKWARD_OVER, index)
        elif rank.position < len(self.script):
            what, of = self.script[rank.position]
            yield Move(what, index, of)
        else:
            yield from self._gathers(index, rank)
            for number in self.numbers if self.scene.outside else ():
                if not parts[number].frozen and not rank.here[number]:
                    yield Move(What.STORED_GRADIENT, index, number)
            for part in parts if self.scene.outside else ():
                # ranks check other kinds for remainders anyway
                if part.kind is BucketKind.ORDINARY and part.unit not in rank.outside:
                    yield Move(What.USED_OUTSIDE, index, part.unit)
            yield Move(What.BACKWARD_OVER, index)

    def _gathers(self, index: int, rank: Rank) -> Iterator[Move]:
        for unit in range(self.scene.units):
            yield Move(What.UNIT_DONE if unit in rank.open else What.UNIT_GATHERED, index, unit)

    def waits(self, rank: Rank) -> bool:
        """Whether the next step of the rank needs a collective that some rank has not launched."""
        if not rank.todo:
            return False
        what, *of = rank.todo[0]
        if what == "gather":
            return any(len(other.gathered) <= of[0] for other in self.ranks)
        if what == "land":
            return bool(rank.in_flight) and any(len(other.sent) <= rank.in_flight[0][0] for other in self.ranks)
        return what in ("answer", "answers") and any(other.said is None for other in self.ranks)

    # executing moves

    def perform(self, move: Move) -> None:
        """Execute a move.

        Raises:
            Violation: an invariant is violated, or a legal move is refused.
        """
        rank = self.ranks[move.rank]
        try:
            if move.what in SHARED and not self.scene.apart:
                if rank.position == len(self.script):
                    self.script += ((move.what, move.of),)
                rank.position += 1
            self._do(rank, move.what, move.of)
        except RuntimeError as refused:
            raise Violation(f"a legal move was refused: {refused}") from refused

    def _do(self, rank: Rank, what: What, of: int) -> None:
        match what:
            case What.BACKWARD_BEGINS:
                for one in self.ranks:
                    one.rest()
                    one.running = True
                    if self.scene.apart:
                        # autograd will not reach the first unit on the first rank
                        for number in self.numbers if one is self.ranks[0] else ():
                            if self.scene.parts[number].unit == 0:
                                self._on(one, number, E.UNUSED)
            case What.NO_SYNC_KEEPS:
                rank.here = changed(rank.here, of, True)
                if A.ACCUMULATE_UNSHARDED in self._on(rank, of, E.ACCUMULATE):
                    rank.here = changed(rank.here, of, False)
                    rank.kept = changed(rank.kept, of, True)
                require(not rank.here[of], "a gradient outlives a backward under no_sync, and is not kept")
            case What.UNIT_GATHERED:
                rank.queue.on_unit(of, UnitEvent.GATHERED)
                rank.open |= {of}
                if self.scene.gathers:
                    rank.gathered += (of,)
                    self._check_alike("gathered")
                    rank.todo = (("gather", len(rank.gathered) - 1),)
            case What.UNIT_DONE:
                rank.open -= {of}
                if rank.queue.on_unit(of, UnitEvent.POST_BACKWARD):
                    for number in self._of_unit(of):
                        self._on(rank, number, E.POST_BACKWARD)
                    rank.todo = (("advance",),)
            case What.USED_OUTSIDE:
                rank.queue.on_unit(of, UnitEvent.USED_OUTSIDE)
                rank.outside |= {of}
            case What.GRADIENT | What.STORED_GRADIENT | What.LAST_GRADIENT:
                rank.here, rank.came = changed(rank.here, of, True), changed(rank.came, of, True)
                if what is What.LAST_GRADIENT:
                    rank.complete = changed(rank.complete, of, True)
                    if A.OFFER in self._on(rank, of, E.GRADS_COMPLETE):
                        rank.todo = (("advance",),)
            case What.BACKWARD_OVER:
                rank.open = frozenset()
                flushes = tuple(("flush", unit) for unit in reversed(range(self.scene.units)))
                commits = tuple(("commit", unit) for unit in reversed(range(self.scene.units)))
                anyway = (("anyway",), ("advance",)) if self.scene.apart else ()
                rank.todo = (*anyway, ("take stock",), *flushes, ("settle",), *commits, ("end",))
            case What.FAILS:
                self._abandon()
            case What.GOES_ON:
                (name, *given), rank.todo = rank.todo[0], rank.todo[1:]
                getattr(self, "_" + name.replace(" ", "_"))(rank, *given)

    def _of_unit(self, unit: int) -> Iterator[int]:
        return (number for number in self.numbers if self.scene.parts[number].unit == unit)

    def _on(self, rank: Rank, number: int, event: BucketEvent) -> tuple[BucketAction, ...]:
        self.used.add((self.scene.parts[number].kind, rank.queue._states[number], event))
        return rank.queue.on(number, event)

    # the minimal reducer

    def _gather(self, rank: Rank, number: int) -> None:
        """The rank has waited for it."""

    def _answers(self, rank: Rank) -> None:
        """The rank has waited for them."""

    def _advance(self, rank: Rank) -> None:
        group = rank.queue.next_group()
        if group is not None:
            rank.todo = (("turn", tuple(group), 0, ()), ("advance",), *rank.todo)

    def _turn(self, rank: Rank, group: tuple[int, ...], place: int, launched: tuple[int, ...]) -> None:
        """Take the turn of one bucket of a group after the other, then launch the group."""
        if place == len(group):
            rank.todo = ((("launch", launched, False),) if launched else ()) + rank.todo
            return
        number = group[place]
        actions = self._on(rank, number, E.TURN_FROZEN if self.scene.parts[number].frozen else E.TURN)
        if A.ASK in actions:
            known = rank.here[number] or rank.kept[number]
            rank.todo = (("has" if known else "answer", group, place, launched), *rank.todo)
        else:
            self._turn_taken(rank, group, place, launched, actions)

    def _has(self, rank: Rank, group: tuple[int, ...], place: int, launched: tuple[int, ...]) -> None:
        self._turn_taken(rank, group, place, launched, self._on(rank, group[place], E.SOME_RANK_HAS))

    def _answer(self, rank: Rank, group: tuple[int, ...], place: int, launched: tuple[int, ...]) -> None:
        has = self._some_rank(0, group[place])
        self._turn_taken(rank, group, place, launched, self._on(rank, group[place], E.SOME_RANK_HAS if has else E.NO_RANK_HAS))

    def _turn_taken(
        self, rank: Rank, group: tuple[int, ...], place: int, launched: tuple[int, ...], actions: Sequence[BucketAction]
    ) -> None:
        if A.LAUNCH_REDUCTION in actions:
            launched += (group[place],)
        rank.todo = (("turn", group, place + 1, launched), *rank.todo)

    def _launch(self, rank: Rank, buckets: tuple[int, ...], remainder: bool) -> None:
        oldest = rank.in_flight[0][1] if len(rank.in_flight) >= self.scene.lanes else ()
        if oldest and all([A.WAIT in self._on(rank, number, E.MAKE_ROOM) for number in oldest]):
            rank.todo = (("land",), ("launch", buckets, remainder), *rank.todo)
            return
        for number in buckets:
            require(not any(number in one for _, one in rank.in_flight), "a bucket is filled under the reduction that reads it")
            require(rank.launched[number] is remainder, "what no_sync kept is reduced twice, or not at all")
            rank.launched, rank.here = changed(rank.launched, number, True), changed(rank.here, number, False)
        rank.sent += ((buckets, remainder),)
        self._check_alike("sent")
        if self.scene.at_once:
            for number in buckets:
                self._on(rank, number, E.LANDED)
                rank.result = changed(rank.result, number, True)
        else:
            rank.in_flight += ((len(rank.sent) - 1, buckets),)

    def _land(self, rank: Rank) -> None:
        (_, buckets), rank.in_flight = rank.in_flight[0], rank.in_flight[1:]
        for number in buckets:
            self._on(rank, number, E.LANDED)
            rank.result = changed(rank.result, number, True)

    def _anyway(self, rank: Rank) -> None:
        for number in self.numbers:
            self._on(rank, number, E.LAUNCH_ANYWAY)

    def _take_stock(self, rank: Rank) -> None:
        more = []
        for number in self.numbers:
            remainder = A.COUNT_REMAINDER in self._on(rank, number, E.TAKE_STOCK)
            require(remainder or not rank.launched[number], "what was launched is counted again as if it was not")
            more.append(remainder and rank.here[number])
        came = tuple(came or kept for came, kept in zip(rank.came, rank.kept, strict=True))
        rank.said = (came, tuple(more))

    def _flush(self, rank: Rank, unit: int) -> None:
        for number in self._of_unit(unit):
            self._on(rank, number, E.FLUSH_GRADS)
        rank.flushed += 1
        last = (("remainder", 0),) if rank.flushed == self.scene.units else ()
        rank.todo = (("advance",), *last, *rank.todo)

    def _remainder(self, rank: Rank, place: int) -> None:
        order = [number for group in self.scene.groups for number in group]
        if place == len(order):
            return
        number, rank.todo = order[place], (("remainder", place + 1), *rank.todo)
        checked = rank.queue._unit_states[self.scene.parts[number].unit] in CHECKED
        event = E.REMAINDER_TURN_CHECKED if checked else E.REMAINDER_TURN
        self.used.add((self.scene.parts[number].kind, rank.queue._states[number], event))
        actions = rank.queue.on_remainder_turn(number)
        assert rank.said is not None
        if A.LOOK_HERE in actions or A.LOOK_EVERYWHERE in actions:
            if rank.said[1][number]:
                rank.todo = (("first lands", number), *rank.todo)
            elif A.LOOK_EVERYWHERE in actions:
                rank.todo = (("look", number), *rank.todo)

    def _look(self, rank: Rank, number: int) -> None:
        if any(other.said is None for other in self.ranks):
            rank.todo = (("answers",), ("look", number), *rank.todo)
        elif self._some_rank(1, number):
            rank.todo = (("first lands", number), *rank.todo)

    def _first_lands(self, rank: Rank, number: int) -> None:
        actions = self._on(rank, number, E.SOME_RANK_HAS)
        if A.WAIT in actions:
            rank.todo = (("land",), ("first lands", number), *rank.todo)
        if A.LAUNCH_REMAINDER in actions:
            rank.todo = (("launch", (number,), True), *rank.todo)

    def _settle(self, rank: Rank) -> None:
        if rank.in_flight:
            rank.todo = (("land",), ("settle",), *rank.todo)

    def _commit(self, rank: Rank, unit: int) -> None:
        require(rank.flushed == self.scene.units and not rank.in_flight, "a commit before all that can fail is over")
        for number in self._of_unit(unit):
            require(not rank.here[number], "a gradient that came was not reduced")
            put = A.PUT in self._on(rank, number, E.COMMIT)
            require(put is rank.result[number], "a result is not put into .grad, or is put there twice")
            require(put or not rank.kept[number], "what no_sync kept was not reduced")
            rank.kept = changed(rank.kept, number, False)
            rank.result = changed(rank.result, number, False)
        rank.committed += (unit,)

    def _end(self, rank: Rank) -> None:
        rank.running = False
        self._check_at_rest(rank)
        if not any(one.running for one in self.ranks):
            require(len({one.sent for one in self.ranks}) == 1, "the ranks launched different reductions")
            self._rest()

    def _abandon(self) -> None:
        for rank in self.ranks:
            require(len(rank.committed) in (0, self.scene.units), "a step failed after a commit")
            rank.in_flight = ()
            for number in self.numbers if rank.running else ():
                # twice, because the first time may be interrupted
                self._on(rank, number, E.DRAINED)
                self._on(rank, number, E.DRAINED)
                if A.FORGET in self._on(rank, number, E.DROP_GRADS):
                    rank.here, rank.result = changed(rank.here, number, False), changed(rank.result, number, False)
                require(not rank.here[number] and not rank.result[number], "a gradient outlives a step that was given up")
            self._check_at_rest(rank)
        self._rest()

    def _rest(self) -> None:
        self.script = ()
        for rank in self.ranks:
            rank.rest()

    # the invariants

    def _some_rank(self, which: int, number: int) -> bool:
        return any(other.said is not None and other.said[which][number] for other in self.ranks)

    def _check_at_rest(self, rank: Rank) -> None:
        for number in self.numbers:
            state = rank.queue._states[number]
            require(state is BucketState.EMPTY, f"the backward is over, and bucket {number} is {state.name}")

    def _check_alike(self, name: str) -> None:
        """Check that every rank launches the same collectives in the same order."""
        for one in self.ranks:
            for other in self.ranks:
                for mine, theirs in zip(getattr(one, name), getattr(other, name), strict=False):
                    require(mine == theirs, f"the ranks launched different collectives: {mine}, {theirs}")


def require(condition: bool, what: str) -> None:
    """Raise Violation unless `condition`."""
    if not condition:
        raise Violation(what)
