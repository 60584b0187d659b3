"""What an installed peer has and its door does not know: refused by name where it is used.

A later version of torch may add a field to a policy, a member to an enumeration, an argument or a method. A door that went on
without it would compute something else than was asked for. A peer's default value asks for nothing, and is accepted.
"""

from collections.abc import Callable, Collection
from functools import partial, wraps
from inspect import isfunction, signature
from typing import Any, Final, NoReturn, TypeVar, cast

from fsdp.building.torch_policies import UNKNOWN, are_alike
from fsdp.errors import ShardingError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
_LEFT_ALONE: Final = ("forward",)
"""Methods that are called too often to look at their arguments."""


def refuse_unknown_member(given: Any, known: Collection[str]) -> None:
    """Check that a member of an enumeration is one of `known`, or None.

    Raises:
        ShardingError: it is none of them.
    """
    if given is not None and getattr(given, "name", given) not in known:
        raise ShardingError(f"{given}: {UNKNOWN} Known are {', '.join(known)}.")


def refuse_unknown_argument(where: str, name: str, value: object, theirs: Callable[..., Any]) -> bool:
    """Whether the function of a peer has an argument of that name, which then has its default value.

    Raises:
        ShardingError: it has another value.
    """
    # a decorator may have added it
    argument = signature(theirs).parameters.get(name) or signature(theirs, follow_wrapped=False).parameters.get(name)
    if argument is None:
        return False
    if not are_alike(value, argument.default):
        raise ShardingError(f"{where}: {name}={value!r}: {UNKNOWN}")
    return True


def takes_arguments_of(find_theirs: Callable[[], Any], where: str, answered: Collection[str] = ()) -> Callable[[F], F]:
    """Let a function be called with arguments that a peer's function has and it has not. See `refuse_unknown_argument`.

    `find_theirs`: returns the peer's function, or None if there is none. `answered`: arguments that the function sees itself.
    """

    def decorate(function: F) -> F:
        known = signature(function).parameters

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in [name for name in kwargs if name not in known and name not in answered]:
                theirs = find_theirs()
                if theirs is not None and refuse_unknown_argument(where, name, kwargs[name], theirs):
                    del kwargs[name]
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate


def stands_in_for(peer: type, cls: C, answered: Collection[str] = ()) -> C:
    """Let the methods of a class take the arguments of `peer`, whose place it takes; return the class.

    `answered`: arguments that the methods see themselves.
    """
    for name, one in list(vars(cls).items()):
        if name in _LEFT_ALONE or (name.startswith("_") and name != "__init__"):
            continue
        where = f"{cls.__name__}.{name}".removesuffix(".__init__")
        decorate: Callable[[Any], Any] = takes_arguments_of(partial(getattr, peer, name, None), where, answered)
        if isinstance(one, staticmethod):
            setattr(cls, name, staticmethod(decorate(one.__func__)))
        elif isfunction(one):
            setattr(cls, name, decorate(one))
    return cls


def refuses_names_of(peer: type, cls: C) -> C:
    """Let the objects of a class, all of them modules, refuse the public names of `peer` that they have not; return the class."""
    get, set_ = getattr(cls, "__getattr__"), getattr(cls, "__setattr__")  # noqa: B009  # to mypy they are those of `type`

    def __getattr__(self: Any, name: str) -> Any:
        try:
            return get(self, name)
        except AttributeError as missing:
            # a class may have a better answer for a name that it does not have
            if name in vars(peer) and not name.startswith("_") and "object has no attribute" in str(missing):
                raise AttributeError(f"{cls.__name__}.{name}: {UNKNOWN}") from missing
            raise

    def __setattr__(self: Any, name: str, value: object) -> None:
        if name in vars(peer) and not name.startswith("_") and not hasattr(cls, name):
            raise ShardingError(f"{cls.__name__}.{name}={value!r}: {UNKNOWN}")
        set_(self, name, value)

    setattr(cls, "__getattr__", __getattr__)  # noqa: B010
    setattr(cls, "__setattr__", __setattr__)  # noqa: B010
    return cls


def refused_names(peer: type, cls: type) -> dict[str, Any]:
    """By public name of `peer` that a class has not: a method that raises ShardingError, or a property that does if it is set."""
    absent = {name: one for name, one in vars(peer).items() if not (name.startswith("_") or hasattr(cls, name))}
    refused = {name: refusing(f"{cls.__name__}.{name}") for name in absent}
    is_method = {name: isinstance(one, classmethod) or callable(one) for name, one in absent.items()}
    return {name: refused[name] if is_method[name] else property(fset=refused[name]) for name in absent}


def refusing(where: str) -> Callable[..., NoReturn]:
    """A function that raises ShardingError. `where`: the name of what it stands for."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ShardingError(f"{where}: {UNKNOWN}")

    return refuse
