"""Options, checked by their annotations: what cannot be is refused by name, with its value and what
it must be.

    @dataclass(frozen=True)
    class Method:
        rank: Annotated[int, at_least(1)]
        per: tuple[int, int] | None = None
        half_step: bool = False

        def __post_init__(self) -> None:
            check_options(self)

    @checked
    def register(
        model: nn.Module, *, message_bytes: Annotated[int, at_least(0)] | None = None
    ) -> Handle: ...

Numbers of NumPy and of 0-dimensional arrays become Python's. A bool is no number, a str is no bool,
and neither NaN nor an infinity is a number. What stands beside a type in `Annotated` limits it:
`Limits`, `Names`, or a function (value, name) that raises. A str is advice, and ends the message.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


#: Beside a type: what takes the option says by itself what it takes, and how to come by that.
OWN_CHECK = "it is looked at where it is used"


@dataclass(frozen=True)
class Limits:
    """What numbers may be: at least `least` (more than that, if it is `open`), at most `most`
    (less, if it is `open`)."""

    least: float = -math.inf
    most: float = math.inf
    open_below: bool = False
    open_above: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.least if self.open_below else value >= self.least
        return above and (value < self.most if self.open_above else value <= self.most)

    def __str__(self) -> str:
        below, above = (
            "more than" if self.open_below else "at least",
            "less than" if self.open_above else "at most",
        )
        said = [f"{below} {self.least:.12g}"] if self.least > -math.inf else []
        return " and ".join(
            [*said, *([f"{above} {self.most:.12g}"] if self.most < math.inf else [])]
        )


@dataclass(frozen=True)
class Names:
    """The names that there are, now or later. `read` makes a name of what a framework has in its
    place, such as a dtype."""

    known: Collection[str] = field(hash=False)  # a registry is no key, and typing wants one
    read: Callable[[Any], Any] = lambda value: value

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.known))}"


def at_least(least: float, most: float = math.inf) -> Limits:
    """A check for `Annotated[int, at_least(1)]`: `least` or more, and at most `most`."""
    return Limits(least, most)


def more_than(least: float, most: float = math.inf) -> Limits:
    """More than `least`, and at most `most`."""
    return Limits(least, most, open_below=True)


def share(*, least_open: bool = False, most_open: bool = False) -> Limits:
    """A check for numbers between 0 and 1, these included unless said otherwise."""
    return Limits(0, 1, least_open, most_open)


#: The usual numbers: how many, from 0 or from 1 on; and what is more than 0.
AtLeast0 = Annotated[int, at_least(0)]
AtLeast1 = Annotated[int, at_least(1)]
Positive = Annotated[float, more_than(0)]
#: A time that may be none.
Seconds = Annotated[float, at_least(0)]
#: How many replicas: what enumerates them ends.
Replicas = Annotated[int, at_least(1, 1 << 20)]


def check_options(config: Any) -> None:
    """Check the fields of a frozen dataclass by their annotations, in its `__post_init__`, and put
    numbers of NumPy as Python's.

    Raises:
        TypeError: an option is of another type.
        ValueError: it is out of its limits, or not one of the names that there are.
    """
    hints = _hints(cast(Hashable, type(config)))
    for each in fields(config):
        value = getattr(config, each.name)
        new = check(each.name, value, hints.get(each.name, Any))
        if new is not value:
            object.__setattr__(config, each.name, new)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: the arguments are checked by the function's annotations, as options are. Others
    than numbers, bools, strings and collections of them by `isinstance`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def with_checks(*args: P.args, **kwargs: P.kwargs) -> T:
        hints = _hints(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own words name the function too
        for name, value in bound.arguments.items():
            if name in hints and signature.parameters[name].kind not in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            ):
                bound.arguments[name] = check(name, value, hints[name])
        return function(*bound.args, **bound.kwargs)

    return with_checks


def check(name: str, value: Any, hint: Any) -> Any:
    """The value of an option, as its annotation has it. Raises as `check_options` does."""
    try:
        return _as(value, hint, name)
    except _NotThis as refused:
        error = ValueError if refused.of_its_type else TypeError
        raise error(f"{name}={short(value)} must be {_said(hint)}") from None


class _NotThis(Exception):
    """A value is not what an annotation says, but `of_its_type`."""

    def __init__(self, of_its_type: bool = False) -> None:
        self.of_its_type = of_its_type


#: What annotations say, by class or function. No `functools.cache`: where compiled autograd traces
#: a hook, it would warn of one before the hook can refuse.
_KNOWN: dict[Hashable, dict[str, Any]] = {}


def _hints(owner: Hashable) -> dict[str, Any]:
    if owner not in _KNOWN:
        try:
            _KNOWN[owner] = typing.get_type_hints(owner, include_extras=True)
        except NameError:
            # Of a class in a function, whose annotations name what only that function knows: its
            # own are not checked.
            _KNOWN[owner] = _hints(owner.__mro__[1]) if isinstance(owner, type) else {}
    return _KNOWN[owner]


def _as(value: Any, hint: Any, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        if OWN_CHECK in args[1:]:
            return value
        value = _as(value, args[0], name)
        for limit in args[1:]:
            value = _within(value, limit, name)
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, args, name)
    if origin is typing.Literal:
        value = _scalar(value)
        if any(value is each or (type(value) is type(each) and value == each) for each in args):
            return value
        raise _NotThis(of_its_type=any(type(value) is type(each) for each in args))
    if hint is int:
        return _integer(value)
    if hint is float:
        return _number(value)
    if hint in (bool, str):
        if type(value) is hint or (hint is str and isinstance(value, str)):
            return value
        raise _NotThis
    if hint is None or hint is type(None):
        if value is None:
            return value
        raise _NotThis
    if origin is tuple:
        return _tuple(value, args, name)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _NotThis
        new = {
            check(f"a key of {name}", key, args[0]): check(f"{name}[{short(key)}]", each, args[1])
            for key, each in value.items()
        }
        return value if _same(value.values(), new.values()) and _same(value, new) else new
    if origin is not None and isinstance(origin, type) and issubclass(origin, Iterable):
        if not isinstance(value, origin) or isinstance(value, str | bytes):
            raise _NotThis
        if not issubclass(origin, Sequence) or not args:
            return value
        items = [check(f"{name}[{i}]", each, args[0]) for i, each in enumerate(value)]
        return value if _same(value, items) else items
    if origin is type:
        if not (isinstance(value, type) and issubclass(value, args[0])):
            raise _NotThis
        return value
    kind = origin or hint
    if kind is not Any and isinstance(kind, type) and not getattr(kind, "_is_protocol", False):
        if not isinstance(value, kind):
            raise _NotThis
    elif kind is Callable and not callable(value):
        raise _NotThis
    return value


def _within(value: Any, limit: Any, name: str) -> Any:
    """A value of the right type, as what limits it has it."""
    if isinstance(limit, Names):
        try:
            value = limit.read(value)
        except Exception as error:  # whatever it is, it is no name
            raise _NotThis from error
        if not isinstance(value, str) or value not in limit.known:
            raise _NotThis(of_its_type=True)
    elif isinstance(limit, Limits):
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in limit:
            raise _NotThis(of_its_type=True)
    elif callable(limit):
        limit(value, name)
    return value


def _same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    return all(this is that for this, that in zip(these, those, strict=True))


def _one_of(value: Any, kinds: Sequence[Any], name: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    of_its_type = False
    for kind in kinds:
        try:
            return _as(value, kind, name)
        except _NotThis as refused:
            of_its_type |= refused.of_its_type
    raise _NotThis(of_its_type)


def _scalar(value: Any) -> Any:
    """A number that lies in an array without axes, as Python's. One that is traced, or has no data,
    stays what it is."""
    try:
        return value.item() if not isinstance(value, type) and value.shape == () else value
    except Exception:
        return value


def _integer(value: Any) -> int:
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _NotThis
    return int(value)


def _number(value: Any) -> float:
    value = _scalar(value)
    kind: Any = type(value)
    if kind is bool or not issubclass(kind, numbers.Real):
        raise _NotThis
    try:
        number = float(value)
    except OverflowError:  # an int, of more than 300 digits
        number = math.inf
    if not math.isfinite(number):
        raise _NotThis(of_its_type=True)
    return value if kind is float or (kind is int and abs(value) < 1 << 53) else number


def _tuple(value: Any, kinds: Sequence[Any], name: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise _NotThis
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        raise _NotThis(of_its_type=True)
    new = tuple(
        check(f"{name}[{i}]", each, kind)
        for i, (each, kind) in enumerate(zip(value, kinds, strict=True))
    )
    # which may say more than its items do
    return value if isinstance(value, tuple) and _same(value, new) else new


def _said(hint: Any) -> str:
    """What an annotation asks for, in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        said = [str(each) for each in args[1:] if isinstance(each, Limits | Names)]
        advice = "".join(f" ({each})" for each in args[1:] if isinstance(each, str))
        return ", ".join([_said(args[0]), *said] if args[0] is not Any else said) + advice
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_said(each) for each in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, args)) if len(args) > 1 else repr(args[0])
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a tuple, each of which is {_said(args[0])}"
        return f"a tuple of {len(args)}: {'; '.join(map(_said, args))}"
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping to {_said(args[1])}"
    if origin is type:
        return f"a class of {args[0].__name__}"
    words = {
        int: "an int",
        float: "a finite number",
        bool: "True or False",
        str: "a str",
        type(None): "None",
        None: "None",
    }
    return words.get(hint) or f"a {getattr(origin or hint, '__name__', hint)}"


def short(value: Any, most: int = 80) -> str:
    """A value in a message."""
    try:
        text = repr(value)
    except Exception:  # whatever it is, it is refused
        text = object.__repr__(value)
    return text if len(text) <= most else f"{text[:most]}… (a {type(value).__name__})"
