"""Old names. They work for one more version, with a `DeprecationWarning` that says the new one.

__getattr__ = old_names(__name__, {"by_element": "gradwire.shard_by_element"})     # in a module

@old_arguments(group_bytes="message_bytes")                                        # of a function
def register_comm_hook(…): …

class Plan:
    ratio = old_attribute("ratio", "compression_ratio")
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(old: str, new: str) -> None:
    """To the caller of the caller."""
    warnings.warn(f"{old} is now {new}; the old name will go with the next version", DeprecationWarning, stacklevel=3)


def old_names(
    module: str, names: Mapping[str, str], otherwise: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """A `__getattr__` for a module: old name → full path of what is meant now, such as "gradwire.core.checkpoint.StateMismatch". `otherwise`
    is the `__getattr__` for all other names."""

    def lookup(name: str) -> Any:
        if name not in names:
            if otherwise is not None:
                return otherwise(name)
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name])
        home, _, new = names[name].rpartition(".")
        return getattr(importlib.import_module(home), new)

    return lookup


def old_module(module: str, new: str) -> Callable[[str], Any]:
    """A `__getattr__` for the old path of a module: all that `new` holds under its own names."""

    def lookup(name: str) -> Any:
        there = importlib.import_module(new)
        # What asks for these is the import system, which no user has to change.
        if name.startswith("__") or not hasattr(there, name):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{new}.{name}")
        return getattr(there, name)

    return lookup


def old_arguments(**renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept old keywords of a function: old → new. Raises TypeError for a call with both."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accepting(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in renamed.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"{old}= is the old name of {new}=: give the new one alone")
                    warn_renamed(f"{old}=", f"{new}=")
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return accepting

    return decorate


def old_attribute(old: str, new: str) -> Any:
    """A property of a class under its old name."""

    def read(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(
        read, doc=f"The old name of `{new}`, for one more version: reading it warns with DeprecationWarning."
    )
