"""One unit: gathers its unsharded parameters, lets its modules show them, and frees them.

Rule 1: the sharded parameters are the user's Parameter objects, the unsharded ones are made by the unit. Both live as long as it.
Rule 2: the modules show unsharded parameters only between USE_UNSHARDED and USE_SHARDED. At any other time
        they show shards, so that nothing reads freed memory.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from fsdp.autograd.frames import in_backward, is_running
from fsdp.comm.context import CommContext
from fsdp.comm.work import Work
from fsdp.config import Config
from fsdp.device.storage import MemoryTracker, size_of
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer, SavedShards
from fsdp.params.gathered_copies import GatheredCopies, WatchedCopy, gather_param, local_param
from fsdp.params.module_tree import refuse_transforms
from fsdp.params.shown_params import (
    PendingGrads,
    forget_owner,
    in_grad_hook,
    module_params_of,
    owning_unit,
    register_owner,
    show_plainly,
    touches,
)
from fsdp.params.summoned_params import FullParams
from fsdp.params.versions import Versions
from fsdp.params.wire import JointGather
from fsdp.shards.shard_parameter import shard_changes
from state_machine import ReshardPolicy

_GRAD: Final = attrgetter("grad")


class UnitObserver(Protocol):
    """Handles uses of the parameters of a unit outside its own forward."""

    def before_copy(self, flat: FlatBuffer, dtype: torch.dtype) -> None:
        """A copy of a flat buffer is about to be gathered in a dtype."""

    def on_used_outside(self) -> None:
        """A parameter is read outside the unit, and the value requires a gradient."""

    def factor_of_part(self) -> float:
        """By what the gradient of a term that each rank computes of its part of a parameter is multiplied: so it counts once.

        Raises:
            ShardingError: a rank computes no such term.
        """

    def on_external_grad(self) -> None:
        """A gradient of one parameter is about to come from a use outside the unit."""

    def has_come(self, flat: FlatBuffer, index: int) -> bool:
        """Whether a gradient of a parameter of a flat buffer has come in this backward, which is not in `.grad` yet."""

    def unshard_for_backward(self) -> bool:
        """Unshard the unit until the end of the backward; return whether its parameters may then be used."""


class UnitSettings(NamedTuple):
    """What was set on a unit after wrapping. It stays when a root is wrapped around, or another unit is made in its place."""

    divide_factors: tuple[float, float] | None = None
    """What gradients are divided by before and after the sum. None: what the root's `ReductionPolicy` says."""
    after_reduction: Callable[[Tensor], object] | None = None
    """Called with each chunk (C,) of reduced gradients, which it may change in place."""
    reshard_policy: ReshardPolicy | None = None
    """When unsharded parameters are freed. None: as the options of `fully_shard` say."""
    ahead: tuple[Sequence[nn.Module], Sequence[nn.Module]] = ((), ())
    """The units that are gathered with it in forwards, and in backwards, nearest first. Empty: what came next before."""


class Unit:
    """The parameters that are gathered and released together, and the modules that show them."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        name: str,
        flats: Sequence[FlatBuffer],
        config: Config,
        comms: CommContext,
        settings: UnitSettings = UnitSettings(),  # noqa: B008  # a tuple
    ) -> None:
        self._modules = tuple(map(weakref.ref, modules))
        self.name = name
        """What messages call it. A unit that was wrapped by hand gets a longer name from a root around it."""
        self.config = config
        self.comms = comms
        """The communicators of the ranks among which the unit is cut, but for flat buffers with others of their own."""
        self.comm = comms.shard_comm
        self.settings = settings
        self._streams: Streams
        self._tracker: MemoryTracker
        self._device = torch.device("cpu")
        self.shard_device = self._device
        """The device of numbers about the gradients of the root: the host's if shards of any of its units are there."""
        self._works: list[Work] = []
        self._root_comms = comms
        self._process = os.getpid()
        self.is_put_away = False
        """Whether `fsdp.offload` has moved the shards to the host, until `fsdp.onload`."""
        self.has_replaced = False
        """Whether the user had pointed a sharded parameter at other memory when the shards were last checked."""
        self._open = False
        self._write_back: Callable[[], object] | None = None
        """Called before modules show shards: a recompute, or what came after it, may have changed unsharded parameters."""
        self.observer: UnitObserver
        self.flats = tuple(flats)
        self.gathered_flats = tuple([flat for flat in flats if not flat.is_shared])
        """Those whose unsharded parameters have memory of their own."""
        self.copies_shards = any(flat.home.copies for flat in self.flats)
        """See `Home.copies`."""
        self.versions = Versions(self.flats)
        self.full_params = FullParams(self.flats)
        self.has_full_params = False
        """Whether the user's Parameter objects point at full parameters, or the modules show these."""
        self._read_copies: list[WatchedCopy] = []
        """The copies that reads in forwards returned. Each is watched as long as its memory lives."""
        self.param_infos = tuple(info for flat in self.flats for info in flat.param_infos)
        self.sharded_params = tuple(p for flat in self.flats for p in flat.sharded_params)
        self.unsharded_params = tuple(p for flat in self.flats for p in flat.unsharded_params)
        self.pending = PendingGrads(self.sharded_params)
        """The shards, from the first gradient of a backward until the reduced ones are put in."""
        self.listed = PendingGrads(self.unsharded_params)
        """The unsharded parameters, once code in a backward has listed them, until the engine looks at their gradients."""
        self.trains = any(map(any, (flat.requires_grad_flags for flat in self.flats)))
        """Whether any parameter is trainable."""
        self._asks_flags = any([flat.asks_addresses for flat in self.flats])
        self._flags_seen = -1
        """`shard_changes` when the flags were last found right; less than that for shards that count no changes."""
        self.keys = frozenset(flat.key for flat in self.flats)
        """The storage keys of the unsharded parameters."""
        self._places: dict[int, tuple[FlatBuffer, int]] = {}
        """The flat buffer of each parameter, and its number there, by the id of its sharded and of its unsharded Parameter."""
        for flat in self.flats:
            for number, pair in enumerate(zip(flat.sharded_params, flat.unsharded_params, strict=True)):
                for parameter in pair:
                    self._places[id(parameter)] = flat, number
                    register_owner(parameter, self)
        self._module_params = module_params_of(self.param_infos, self.unsharded_params)
        self._touches = touches.count
        """What it was when the unit last looked at what its modules show."""
        self.replaces_params = any(flat.placements[0].replaces_param for flat in self.flats)
        """Whether the shards are other objects than the user's Parameters, in whose places they are trained: DTensors."""
        if self.replaces_params:
            self.use_sharded()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules whose forwards are the unit's: one, or those of a list."""
        return tuple(module for reference in self._modules if (module := reference()) is not None)

    @property
    def is_running(self) -> bool:
        """Whether a forward of the unit is running."""
        return any([is_running(module) for module in self.modules])

    @property
    def module(self) -> nn.Module:
        """The module that is the unit, or the first of a list. It is alive whenever code asks for it."""
        # The unit refers to its modules weakly: autograd graphs refer to the unit in ways that Python's garbage collector does
        # not see, and a module may hold a graph (`self.aux = loss`).
        module = self._modules[0]()
        assert module is not None
        return module

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.param_infos)} parameters)"

    def set(self, **settings: Any) -> None:
        """Change some of its settings, by name."""
        self.settings = self.settings._replace(**settings)

    def join(
        self, comms: CommContext, streams: Streams, tracker: MemoryTracker, device: torch.device, shard_device: torch.device
    ) -> None:
        """Become part of a root: use its communicators, if they connect the same ranks, its streams, tracker and devices."""
        if self.comms.same_ranks_as(comms):
            self.comms = comms
        self._streams = streams
        self._tracker = tracker
        self._device = device
        self._root_comms = comms
        self.shard_device = shard_device
        for flat in self.flats:
            flat.join(comms)
            tracker.add("shards", flat.home.device_bytes(flat.shard))

    def set_put_away(self, put_away: bool) -> None:
        """The shards are in host memory from now on, or on the device again. While they are not, refuse what needs them."""
        self.is_put_away = put_away
        for flat in self.flats:
            flat.home.count_put_away(self._tracker, flat.shard, put_away)

    @property
    def gather_sizes(self) -> tuple[int, ...]:
        """Bytes of the unsharded parameters that each all-gather of this unit fills."""
        return tuple(size_of(flat.unsharded) for flat in self.gathered_flats)

    @property
    def device(self) -> torch.device:
        """The device that computes; of a unit without parameters that of its root."""
        return self.flats[0].device if self.flats else self._device

    def stop_intercepting(self) -> None:
        """Let reads give the unsharded parameters directly: the unit's forward, or a recompute of it, runs."""
        self._open = True
        for module_params in self._module_params:
            module_params.stop_intercepting()

    def open_in_backward(self) -> None:
        """Autograd has entered a unit with compiled parts: let reads give the unsharded parameters, as in a recompute of it.

        A recompute of such a part would be compiled anew: torch.compile compares the class of each dict with that of the forward.
        """
        self._write_back = self.write_back_inplace_of_recompute
        for module_params in self._module_params:
            module_params.stop_intercepting()

    def intercept_reads(self) -> None:
        """Answer each read of the unsharded parameters with a fresh copy, because an optimizer may step."""
        self._open = False
        for module_params in self._module_params:
            module_params.intercept_reads()

    def begin_recompute(self) -> None:
        """A recompute of the unit begins. What it changes repeats the forward, also if an error ends it."""
        self._write_back = self.write_back_inplace_of_recompute
        self.listed.set(False)

    def refuse_repointed(self) -> None:
        """Raise ShardingError if `.data` of an unsharded parameter was replaced, before a forward inside a backward uses it."""
        if any([flat.is_repointed for flat in self.flats]):
            raise ShardingError(
                f"`.data` of a parameter of unit {self.name!r} was replaced inside a backward, which has not ended, and the unit "
                "is called there. The backward needs the values from before: replace it, evaluate and put it back outside."
            )

    def on_listed(self, parameter: nn.Parameter) -> None:
        """In a backward, code lists the parameters that a module shows, this one among them. It may change what is unsharded."""
        if self._open or self.unsharded_of(parameter) is not parameter:
            return
        self.sync_requires_grad()
        self._write_back = self._write_back or self.write_back_inplace
        self.listed.set(True)

    def begin_pending(self) -> None:
        """Gradients have come that are not reduced yet: `.grad` cannot be read."""
        if not self.pending.is_pending:
            for flat in self.flats:
                if flat.unhooked_at != shard_changes.count:
                    flat.see_hooks()
            self.pending.set(True)

    def holder_of_grad(self, parameter: nn.Parameter) -> nn.Parameter:
        """The shard, which has the `.grad` of `parameter` in a backward. Refused if a gradient has come and is not reduced."""
        flat, number = self._places[id(parameter)]
        if self.observer.has_come(flat, number):
            raise ShardingError(
                f"`.grad` of {flat.param_infos[number].names[0]!r} inside a backward, where its gradient has come and is not "
                "reduced yet: read and change it after the backward, or in p.register_post_accumulate_grad_hook. A tensor hook "
                "returns the new gradient."
            )
        return flat.sharded_params[number]

    def end_recompute(self) -> None:
        """A recompute of the unit has ended. What the user changes until its backward repeats no forward."""
        self._write_back = self.write_back_inplace
        self.intercept_reads()

    def write_back_inplace(self, saved: SavedShards | None = None) -> int:
        """Copy in-place updates of the unsharded parameters into the shards; return the number of parameters updated.

        `saved`: receives what `roll_back_inplace` needs. Give it while the forward still runs and may fail.
        """
        if self.has_full_params:
            return 0  # the modules show these, and the summon writes them back
        changes = sum(map(FlatBuffer.write_back_inplace, self.flats, repeat(self.name), repeat(saved)))
        if changes:
            self.versions.write_back(changes)
        return changes

    def write_back_inplace_of_recompute(self) -> None:
        """Copy in-place updates of a recompute into the shards. They repeat those of the forward, so the backward stays valid."""
        self.versions.repeat(self.write_back_inplace())

    def roll_back_inplace(self, saved: SavedShards) -> list[str]:
        """Undo what a failed forward did to the unsharded parameters: forget it, and restore the shards in `saved`.

        Updates stay where the unsharded parameters share the memory of the shards. Returns the names of what was undone.
        """
        if self.has_full_params:
            return []
        undone = [name for flat in self.flats for name in flat.forget_updates()]
        with torch.no_grad():
            for shard, value, name in reversed(saved):
                shard.copy_(value)
                undone.append(name)
        self.versions.repeat(len(saved))
        return list(dict.fromkeys(undone))

    def sync_requires_grad(self) -> None:
        """Apply changes of `requires_grad` on the sharded parameters to the unsharded ones."""
        if self._flags_seen != shard_changes.count:
            if any([*map(FlatBuffer.sync_requires_grad, self.flats)]):
                self._find_out_if_trained()
            self._flags_seen = shard_changes.count - self._asks_flags

    def refuse_changed_flags(self, shown: bool = False) -> None:
        """Raise ShardingError at the end of a backward if `requires_grad` of a shard was set in it, and was not applied.

        `shown`: also that of an unsharded parameter, which modules show inside a forward.
        """
        before = [flat.requires_grad_flags for flat in self.flats]
        if shown:
            self.take_requires_grad()
        self.sync_requires_grad()
        for flat, flags in zip(self.flats, before, strict=True):
            for info, now, applied in zip(flat.param_infos, flat.requires_grad_flags, flags, strict=True):
                if now is not applied:
                    raise ShardingError(
                        f"requires_grad of {info.names[0]!r} in unit {self.name!r} was set to {now} in a hook of this backward, "
                        "where the gradient may have come or not; set it before the backward or after it."
                    )

    def take_requires_grad(self) -> None:
        """Apply changes of `requires_grad` on the unsharded parameters, which the modules show, to the sharded ones."""
        if any([*map(FlatBuffer.take_requires_grad, self.flats)]):
            self._find_out_if_trained()

    def _find_out_if_trained(self) -> None:
        self.trains = any(map(any, (flat.requires_grad_flags for flat in self.flats)))

    def refuse_put_away(self) -> None:
        """Raise ShardingError if `fsdp.offload` has moved the shards to the host."""
        if self.is_put_away:
            raise ShardingError(f"unit {self.name!r} is in host memory since fsdp.offload; call fsdp.onload(model) first.")

    def refuse_forked(self) -> None:
        """Raise ShardingError in a process that was forked from this rank: it shares the rank's connections."""
        if os.getpid() != self._process:
            raise ShardingError(
                f"unit {self.name!r} is called in a process that was forked from a rank, such as a worker of a DataLoader, which "
                "has no connections of its own and would wait for ever. Call the model in the rank itself; give the worker data "
                "or a plain copy of the module."
            )

    def check_shards(self) -> bool:
        """Check the shards, the modules and the copies for changes by the user; return whether a shard has data of the user.

        Raises:
            ShardingError: the data does not fit, a module shows another parameter, or a copy was changed in place.
        """
        self._check_copies()
        return self._check_shards()

    def _check_copies(self) -> None:
        """Raise ShardingError, and watch no copy any more, if one was changed in place."""
        watched, self._read_copies = self._read_copies, []
        for copy in watched:
            copy.refuse_changed(self.name)
        self._read_copies += filter(WatchedCopy.is_alive, watched)

    def _check_shards(self) -> bool:
        self.refuse_put_away()
        if touches.count != self._touches:
            self._refuse_put_in()
        return self.follow_replaced()

    def follow_replaced(self) -> bool:
        """Let the shards hold data that the user put into parameters (`p.data = x`), or refuse it; say whether there is any."""
        self.has_replaced = any([*map(FlatBuffer.check_shards, self.flats, repeat(self.name))])
        return self.has_replaced

    def check_modules(self) -> None:
        """Raise ShardingError if a module shows another parameter than that of the unit, or none."""
        for module_params in self._module_params:
            module_params.check(self.name)

    def dissolve(self) -> None:
        """Own no parameter any more: all of them are ordinary ones again. A backward through an earlier forward is refused."""
        self.free_unsharded()
        self.versions.invalidate()
        for parameter in (*self.sharded_params, *self.unsharded_params):
            forget_owner(parameter)
        for module_params in self._module_params:
            module = module_params.module
            if module is not None:
                show_plainly(module)

    # uses outside the unit ----------------------------------------------------------------

    def unsharded_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The unsharded parameter of a sharded one, and of itself."""
        flat, number = self._places[id(parameter)]
        return flat.unsharded_params[number]

    def read(self, parameter: nn.Parameter, module: object, reader: object) -> Tensor:
        """The full value of `parameter` for a forward: the unsharded parameter while that may be used, else a copy.

        The copy has the dtype in which the unit computes.
        """
        flat, number = self._places[id(parameter)]
        unsharded = flat.unsharded_params[number]
        # every rank must decide alike, because a copy is gathered: nothing here may depend on the values of this rank
        if self.has_full_params or (parameter is unsharded and self._open):
            return parameter
        if in_backward() and not in_grad_hook():
            read_inside = any(shown.module is reader for shown in self._module_params) or is_running(module)
            # A recompute around the unit may read parameters after the unit's post-backward. A recompute of a part of the
            # unit soon needs the other parameters too, and the ranks may read them in another order.
            is_shown = parameter is unsharded
            if (read_inside and is_shown) or ((read_inside or is_shown) and self.observer.unshard_for_backward()):
                self.sync_requires_grad()
                self._write_back = self.write_back_inplace_of_recompute
                return unsharded
        if parameter is unsharded:  # a hook in a backward inside the forward may have changed what the modules show
            self.write_back_inplace()
        if torch._C._are_functorch_transforms_active():
            refuse_transforms(self.name)
        grads = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grads):  # an inference tensor does not count its changes
            copy = self._gather_param(flat, number, unsharded.dtype)
            self._read_copies.append(WatchedCopy(flat.param_infos[number].names[0], copy, self.config.guard))
        return copy

    def full_value(self, parameter: nn.Parameter, copies: GatheredCopies | None = None) -> Tensor:
        """See `fsdp.full_tensor`. `copies`: see `gather_param`."""
        flat, number = self._places[id(parameter)]
        value = parameter if self.has_full_params else self._gather_param(flat, number, flat.shard.dtype, copies)
        return flat.placements[number].over_all_dims(value, self._root_comms.world_comm.ranks)

    def local_value(self, parameter: nn.Parameter) -> Tensor:
        """See `fsdp.to_local`."""
        if self.has_full_params:
            raise ShardingError("to_local: full parameters cannot be trained; leave summon_full_params first.")
        self.check_shards()
        self.sync_requires_grad()
        return self._used_outside(local_param(*self._places[id(parameter)], self.observer.factor_of_part, self._on_external_grad))

    def _gather_param(self, flat: FlatBuffer, number: int, dtype: torch.dtype, copies: GatheredCopies | None = None) -> Tensor:
        self.refuse_forked()
        self._check_shards()  # copies are looked at between forwards: there may be many of them in one
        self.sync_requires_grad()
        if copies is None or flat not in copies:
            self.observer.before_copy(flat, dtype)
        value = gather_param(flat, number, dtype, self.name, self._on_external_grad, copies)
        if in_backward() and value.requires_grad:
            # In a recompute the gradient may arrive in a graph task of the checkpoint, whose end is not the end of the
            # backward, so the event is sent now.
            self._on_external_grad()
        return self._used_outside(value)

    def _used_outside(self, value: Tensor) -> Tensor:
        if value.requires_grad:
            self.observer.on_used_outside()
        return value

    def _on_external_grad(self) -> None:
        self.observer.on_external_grad()

    # effects of the residency -------------------------------------------------------------

    def all_gather(self) -> None:
        """Allocate the unsharded parameters and launch their all-gather.

        Shapes:   shard (C,) on each of W ranks  ->  unsharded (W * C,), in rank order, cast before sending, and copied to the
                  device before that if it is in host memory
        Traffic:  this rank receives (W - 1) * C elements
        """
        with self._streams.gathering():
            for flat in self.gathered_flats:
                self._works.append(self.gather_together([flat]))
            self._works += self._streams.gathered()

    def gather_together(self, flats: Sequence[FlatBuffer]) -> Work:
        """Launch one all-gather for flat buffers of this unit, or of others on the same ranks.

        Memory: the bytes of all of them once more, until they are copied out; none for one that is gathered in place
        """
        own = [*map(FlatBuffer.begin_gather, flats, repeat(self._tracker), repeat(self._streams))]
        if len(flats) == 1 and flats[0].gathers_in_place:
            return flats[0].comm.all_gather(flats[0].unsharded_bytes, self.name, own[0])

        places = [place for flat in flats for place in flat.unsharded_segments]
        work = JointGather(flats[0].comm, places, own, self.name, self._tracker, [flat.memory for flat in flats])
        if not self._streams.on_host:
            work.wait()  # the gather stream waits and copies, and the host goes on
        return work

    def add_works(self, works: Iterable[Work]) -> None:
        """Wait for these too, before the unsharded parameters may be read."""
        self._works += works

    def wait_all_gather(self) -> None:
        """Wait until the unsharded parameters may be read."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def use_unsharded(self) -> None:
        """Let the modules show the unsharded parameters. Raise ShardingError if the user has put another parameter into one."""
        if touches.count != self._touches:
            self._refuse_put_in()
        for module_params in self._module_params:
            module_params.use_unsharded()

    def _refuse_put_in(self) -> None:
        self.check_modules()
        self._touches = touches.count

    def refuse_changed(self) -> None:
        """Raise ShardingError at the end of a forward if the weights were changed while it ran, as by a step in a hook."""
        self._check_copies()
        if self._open and self.versions.is_copy_of_earlier:
            raise ShardingError(
                f"parameters of unit {self.name!r} were changed while its forward ran, which has computed with what they were "
                "when it began; change them before or after the forward."
            )

    def refuse_lost_acts(self, gradients: Sequence[Tensor | None]) -> None:
        """Check at the end of a forward what the user did with the unsharded parameters that the modules show.

        `gradients`: what theirs were when it began, if they may have had one: in a recompute, and in a pipeline.

        Raises:
            ShardingError: a gradient was set, which no shard would get, or another parameter was put in.
        """
        if touches.count != self._touches and not self.has_full_params:
            self._refuse_put_in()
        self.listed.set(False)
        now = [*map(_GRAD, self.unsharded_params)]
        if any(map(is_not, now, gradients)) if gradients else now.count(None) < len(now):
            before = gradients or repeat(None)
            name = next(info.names[0] for info, *grads in zip(self.param_infos, now, before, strict=False) if is_not(*grads))
            for unsharded in self.unsharded_params:
                unsharded.grad = None
            raise ShardingError(
                f"`.grad` of {name!r} was set inside the forward of unit {self.name!r}, where the module shows an unsharded "
                "parameter, whose gradient does not stay; set it before or after the forward."
            )

    def use_sharded(self) -> None:
        """Let the modules show the shards, also if what was changed in a backward is refused."""
        self.take_requires_grad()
        self._open = False
        self.listed.set(False)
        is_touched = touches.count != self._touches
        for module_params in self._module_params:
            module_params.use_sharded(is_touched)
        write_back, self._write_back = self._write_back, None
        if write_back is not None:
            write_back()

    def free_unsharded(self) -> None:
        """Release the memory of the unsharded parameters. Idempotent."""
        released = False
        for flat in self.gathered_flats:
            released |= flat.memory.release(self._tracker)
        if released:
            self._streams.released()

    # full parameters, for summon_full_params -----------------------------------------------

    def gather_full(self) -> None:
        """Gather the full parameters, and point the user's Parameter objects at them, or let the modules show them."""
        self.full_params.gather(self.name, self._tracker)
        self.has_full_params = True
        own = self.full_params.in_place_of
        for shard, full in own.items():
            register_owner(full, self)
            self._places[id(full)] = self._places[shard]
        self._rest_on(own)

    def _rest_on(self, full: Mapping[int, nn.Parameter]) -> None:
        for module_params in self._module_params:
            module_params.rest_on(full)

    def check_full(self) -> None:
        """See `FullParams.check`."""
        if self.replaces_params:
            self.check_modules()
        self.full_params.check()

    def free_full(self) -> None:
        """Point the user's Parameter objects at the shards again, or let the modules show these. Idempotent."""
        for full in self.full_params.in_place_of.values():
            forget_owner(full)
            self._places.pop(id(full), None)
        self.full_params.free(self._tracker)
        self.has_full_params = False
        self._rest_on({})


class RefuseCopy:
    """Base class of the objects of a unit that its module refers to. Pickling the module reaches one, and it refuses."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(f"unit {self._unit.name!r}: its hooks cannot be copied without its module; copy.deepcopy the model.")

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            f"unit {self._unit.name!r} cannot be pickled, because a module holds the engine of its process: save what "
            "fsdp.full_state_dict(model) returns on rank 0 (every rank calls it), or model.state_dict() by DDP's names."
        )


def unit_of_shard(given: Any) -> Unit | None:
    """The unit of a sharded parameter; None for one that is in full now, and for anything else."""
    owner = owning_unit(given) if isinstance(given, nn.Parameter) else None
    if not isinstance(owner, Unit) or owner.has_full_params or owner.unsharded_of(given) is given:
        return None
    return owner
