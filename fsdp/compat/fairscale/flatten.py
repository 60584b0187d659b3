"""FlattenParamsWrapper: the parameters of a module as views of a few vectors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.building.copies import without_engine
from fsdp.compat.fairscale.flat_params import (
    Flat,
    FlatParameter,
    SharedParam,
    Shown,
    Slot,
    hide,
    joined,
    record,
    show,
    slots_in,
    views_of,
)
from fsdp.compat.shared.instances import Wrapper, rename
from fsdp.errors import ShardingError
from fsdp.params.param_info import kept_accumulator


class FlattenParamsWrapper(Wrapper):
    """Holds the parameters of a module in a few vectors and runs its forward with views of them.

    Args:
        module: the module to wrap.
        param_list: the parameters to flatten, or a list of such lists, one for each vector. Default None: all, in one.
        flat_param_names: a name for each vector. Default None: its number.
        multiple: a vector's length is rounded up to a multiple of this number.
    """

    _fsdp_holds = _fsdp_answers = "_fpw_module"

    def __init__(
        self,
        module: nn.Module,
        param_list: Sequence[Any] | None = None,
        flat_param_names: Sequence[str] | None = None,
        multiple: int = 1,
    ) -> None:
        super().__init__()
        self._fpw_module = module
        self.returns_flat = False
        """Whether `state_dict()` gives the vectors instead of the parameters."""
        self._placeholders: Shown = ()
        """What the modules show outside a forward: tensors with a shape and no memory."""
        self._last_views: Shown = ()
        """What the modules showed in the last forward."""
        self.views: Shown = ()
        """What the modules show in place of parameters."""
        self._shared: Sequence[SharedParam] = ()
        """What else the modules show."""
        self._views_outside_forward = True
        self._shown: list[nn.Parameter] = []
        """The vectors while the modules show parameters in their place."""
        groups = _groups(module, param_list)
        names = [str(i) for i in range(len(groups))] if flat_param_names is None else list(flat_param_names)
        if len(names) != len(groups):
            raise AssertionError(f"flat_param_names has {len(names)} names for {len(groups)} lists of parameters; give as many.")
        if len(set(names)) != len(names):
            raise AssertionError(f"flat_param_names: a name occurs twice in {names!r}; give each vector a name of its own.")
        self._unflattened_names = tuple(f"flat_param_{name}" for name in names)
        flattened = [id(p) for group in groups for p in group]
        if len(set(flattened)) != len(flattened):
            raise AssertionError("param_list: a parameter is in two lists; flatten each parameter once.")
        self.num_params_managed = len(flattened)
        places = slots_in(module, set(flattened))
        if set(places) != set(flattened):
            raise AssertionError("param_list has a parameter that the module does not have; give parameters of the module.")
        self.flats: list[Flat] = []
        for group, name in zip(groups, self._unflattened_names, strict=True):
            if group:
                self._flatten(group, name, places, multiple)
        self.flat_param_names = [flat.attribute for flat in self.flats]
        self.register_state_dict_post_hook(_remove_own_name)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_accept_plain_names)  # type: ignore[no-untyped-call]
        self.refresh_views()

    def store_as_vectors(self, parameters: Sequence[nn.Parameter], multiple: int) -> None:
        """Make each of these parameters a vector of its own, under its own name; the Parameter objects stay.

        Raises:
            ShardingError: a graph is kept in which one has the shape that it has now.
        """
        places = slots_in(self._fpw_module, set(map(id, parameters)))
        for parameter in parameters:
            found = [(module, name) for _, module, name in places[id(parameter)]]
            if kept_accumulator(parameter) is not None and (parameter.dim() != 1 or parameter.numel() % multiple):
                raise ShardingError(
                    f"flatten_parameters=False makes a vector of {found[0][1]!r}, which is in a graph from before wrapping, as "
                    "torch.nn.utils.weight_norm makes one: leave it out, or use torch.nn.utils.parametrizations.weight_norm."
                )
            flat = Flat(*found[0], (parameter.size(),), [found], has_own_name=True)
            if multiple > 1:
                values = parameter.detach()
                parameter.data = torch.cat([values.reshape(-1), values.new_zeros(-values.numel() % multiple)])
            self.flats.append(flat)
            self.num_params_managed += 1

    def stop_showing_views(self, shared: Sequence[SharedParam] = ()) -> None:
        """Show no views outside a forward from now on, because the vectors have their full length in a forward only.

        `shared`: parameters from elsewhere, which the modules show too.
        """
        self.returns_flat, self._views_outside_forward = True, False
        self._shared = shared
        more: Shown = tuple(chain.from_iterable(one.placeholders() for one in shared))
        self._placeholders = more + tuple(
            (module, name, torch.empty(shape, dtype=flat.parameter.dtype, device="meta"))
            for flat in self.flats
            if not flat.has_own_name
            for shape, slots in zip(flat.shapes, flat.slots, strict=True)
            for module, name in slots
        )
        self.hide_views()

    def _flatten(self, group: Sequence[nn.Parameter], name: str, places: dict[int, list[Slot]], multiple: int) -> None:
        flat = FlatParameter(group, _requires_grad(group), multiple)
        slots = [places[id(p)] for p in group]
        flat.set_slots(slots)
        for parameter in group:
            parameter._is_flattened = True  # type: ignore[attr-defined]  # a module outside may have it too
        for _, module, attribute in chain.from_iterable(slots):
            del module._parameters[attribute]
        self._parameters[name] = flat
        plain = [[(module, attribute) for _, module, attribute in found] for found in slots]
        self.flats.append(Flat(self, name, flat._param_shapes, plain))

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fpw_module

    @property
    def is_flattened(self) -> bool:
        """Whether the module shows vectors now."""
        return bool(self.flats) and not self._shown

    @property
    def flat_params(self) -> list[nn.Parameter]:
        """The vectors."""
        return self._shown or [flat.parameter for flat in self.flats]

    @property
    def flat_param(self) -> nn.Parameter:
        """The vector, if there is one."""
        (only,) = self.flat_params
        return only

    def refresh_views(self) -> None:
        """Let the modules show views of the vectors as they are now."""
        self.views = tuple(
            (module, name, view)
            for flat in self.flats
            for view, slots in zip(views_of(flat.parameter, flat.shapes), flat.slots, strict=True)
            for module, name in slots
        )
        for shared in self._shared:
            self.views += shared.values()
        show(self.views)

    def take_last_views(self) -> Shown:
        """What the modules showed in the last forward. It is given once."""
        views, self._last_views = self._last_views, ()
        return views

    def show_again(self, views: Shown) -> None:
        """Let the modules show what they showed in an earlier forward."""
        self.views = views
        show(views)

    def hide_views(self) -> None:
        """Let the modules show no views."""
        hide(self.views)
        self.views = ()
        show(self._placeholders)

    @contextmanager
    def unflatten_params(self, flat_params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Let the modules have parameters instead of vectors inside; their memory is that of the vectors, or of `flat_params`."""
        if flat_params is not None and not self.is_flattened and self.flats:
            raise AssertionError("unflatten_params: the module has parameters already; leave the context around this one first.")
        if not self.is_flattened:
            yield
            return
        self._shown = [flat.parameter for flat in self.flats]
        self.hide_views()
        hide(self._placeholders)
        sources: Sequence[Tensor] = self._shown if flat_params is None else flat_params
        for flat, shown, source in zip(self.flats, self._shown, sources, strict=True):
            if not flat.has_own_name:
                self._parameters.pop(flat.attribute)
            _show_parameters(flat, source.detach(), shown.requires_grad)
        try:
            yield
            self.check_shown()
        finally:
            for flat, shown, source in zip(self.flats, self._shown, sources, strict=True):
                _take_back(flat, source.detach())
                for module, name in flat.slots[0] if flat.has_own_name else [(self, flat.attribute)]:
                    module._parameters[name] = shown
            self._shown = []
            show(self._placeholders)
            if flat_params is not None or self._views_outside_forward:
                self.refresh_views()

    def get_param_views(self, external_data_list: Sequence[Tensor | None] | None = None) -> Iterator[Tensor]:
        """Return views of all parameters, of the vectors or of `external_data_list`, one for each vector."""
        given = external_data_list or [None] * len(self.flats)
        assert len(given) == len(self.flats), f"get_param_views: give data for each of the {len(self.flats)} vectors."
        views = [
            views_of(flat.parameter if data is None else data, flat.shapes) for flat, data in zip(self.flats, given, strict=True)
        ]
        return chain.from_iterable(views)

    def metadata(self, flat_param_idx: int) -> tuple[list[str], Sequence[torch.Size], list[int]]:
        """Return the names, shapes and numbers of elements of the parameters of one vector."""
        flat = self.flats[flat_param_idx]
        return [first for first, *_ in self.names_of(flat)], flat.shapes, [prod(shape) for shape in flat.shapes]

    def names_of(self, flat: Flat) -> list[list[str]]:
        """For each parameter of a vector, every name that it has."""
        paths = {id(module): path for path, module in self._fpw_module.named_modules()}
        return [[joined(paths[id(module)], name) for module, name in slots] for slots in flat.slots]

    def __getstate__(self) -> dict[str, Any]:
        return without_engine(self)

    def check_shown(self) -> None:
        """Raise ShardingError if a module shows a parameter of another shape in place of a vector, which could not take it."""
        for flat in self.flats if self._shown else ():
            for shape, ((module, name), *_) in zip(flat.shapes, flat.slots, strict=True):
                shown = module._parameters[name]
                if shown is not None and shown.shape != shape:
                    raise ShardingError(
                        f"parameter {name!r} became {tuple(shown.shape)} by `.data = x`, where full parameters are shown; "
                        f"it is {tuple(shape)}. Copy into it instead."
                    )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward."""
        if not self.is_flattened:
            return self._fpw_module(*args, **kwargs)
        self.refresh_views()
        vectors = [flat.parameter.data for flat in self.flats]
        try:
            output = self._fpw_module(*args, **kwargs)
            self._refuse_assigned(vectors)
            return output
        finally:
            if not self._views_outside_forward:
                self._last_views = self.views
                self.hide_views()

    def _refuse_assigned(self, vectors: Sequence[Tensor]) -> None:
        """Raises:
        ShardingError: the wrapped module's forward has pointed a vector at other memory, of which no module shows a view.
        """
        assigned = [flat for flat, data in zip(self.flats, vectors, strict=True) if flat.parameter.data_ptr() != data.data_ptr()]
        if assigned:
            raise ShardingError(
                f"`.data` of parameter {assigned[0].attribute!r} was assigned inside the forward of its instance, whose modules "
                "compute with views of what it was when the forward began. Change it in place, by p.copy_(x), or assign it "
                "between forwards."
            )

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a state dict with the vectors."""
        self.returns_flat = True
        try:
            return self.state_dict(*args, **kwargs)
        finally:
            self.returns_flat = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped module."""
        if self.is_flattened and not self.returns_flat:
            with self.unflatten_params():
                return super().state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)


def _groups(module: nn.Module, param_list: Sequence[Any] | None) -> list[list[nn.Parameter]]:
    """The lists of parameters to flatten, one for each vector."""
    if param_list is None:
        return [list(module.parameters())]
    given = list(param_list)
    if given and isinstance(given[0], nn.Parameter):
        return [given]
    return [list(group) for group in given]


def _requires_grad(group: Sequence[nn.Parameter]) -> bool:
    """Whether the parameters of a vector are trained.

    Raises:
        AssertionError: they differ in this or in their dtype.
    """
    for name in ("dtype", "requires_grad"):
        values = {getattr(p, name) for p in group}
        if len(values) > 1:
            raise AssertionError(
                f"the parameters of one flat parameter differ in {name}: {sorted(map(str, values))}; wrap those that differ "
                "by themselves, or give flatten_parameters=False."
            )
    return group[0].requires_grad


def _show_parameters(flat: Flat, data: Tensor, requires_grad: bool) -> None:
    """Let the modules have parameters whose memory is that of `data`."""
    for view, slots in zip(views_of(data, flat.shapes), flat.slots, strict=True):
        parameter = nn.Parameter(view, requires_grad)
        for module, name in slots:
            module._parameters[name] = parameter
            record(module, name, parameter)


@torch.no_grad()
def _take_back(flat: Flat, data: Tensor) -> None:
    """Copy parameters that point at other memory now into `data`, and remove them from the modules."""
    is_full = data.numel() == sum(map(prod, flat.shapes))
    views = views_of(data, flat.shapes) if is_full else [None] * len(flat.slots)  # a failed step has freed the full parameters
    for view, slots in zip(views, flat.slots, strict=True):
        module, name = slots[0]
        shown = module._parameters[name]
        # another shape is refused by `check_shown`
        if view is not None and shown is not None and shown.shape == view.shape and shown.data_ptr() != view.data_ptr():
            view.copy_(shown)
        for module, name in () if flat.has_own_name else slots:
            del module._parameters[name]


OWN_NAME = "_fpw_module."


def _remove_own_name(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    rename(state_dict, prefix + OWN_NAME, prefix)


def _accept_plain_names(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept a state dict with or without the vectors, and names without the wrapper's."""
    vectors = {}
    for flat in module.flats if module.is_flattened else ():
        if flat.has_own_name:
            continue
        names = module.names_of(flat)
        own = prefix + flat.attribute
        if own in state_dict:
            vectors[own] = state_dict.pop(own)
        elif all(prefix + first in state_dict for first, *_ in names):
            parts = [state_dict[prefix + first].reshape(-1) for first, *_ in names]
            for name in chain.from_iterable(names):
                state_dict.pop(prefix + name, None)
            rest = flat.parameter.numel() - sum(part.numel() for part in parts)
            vectors[own] = torch.cat([*parts, parts[0].new_zeros(rest)]) if rest >= 0 else torch.cat(parts)
    known = {prefix + name for name in module._parameters} | {prefix + OWN_NAME}
    moved = {
        (
            key
            if key in known or not key.startswith(prefix) or key.startswith(prefix + OWN_NAME)
            else prefix + OWN_NAME + key[len(prefix) :]
        ): value
        for key, value in state_dict.items()
    }
    state_dict.clear()
    state_dict.update(moved)
    state_dict.update(vectors)
