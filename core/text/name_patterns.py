"""Options that go by patterns of parameter names: `{"layers/*": 1, "*/kernel": 2}`, of which the
first that matches decides."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence

from gradwire.core.text.wording import some

#: Names listed in a message.
SHOWN = 5


class UnmatchedPattern(ValueError):
    """A `pattern` of this `option` fits no parameter."""

    def __init__(self, option: str, pattern: str, names: Sequence[str]) -> None:
        self.option = option
        self.pattern = pattern
        shown = [*difflib.get_close_matches(pattern, names, SHOWN), *names][: 2 * SHOWN]
        shown = list(dict.fromkeys(shown))[:SHOWN]
        in_order = [*shown, *(name for name in names if name not in shown)]
        super().__init__(
            f"{option} pattern {pattern!r} matches no parameter; the parameters are"
            f" {some(in_order, SHOWN)}"
        )


class Patterns(dict[str, int]):
    """Pattern (`fnmatch`, upper and lower case distinct) → number, in the order in which they are
    tried. Not to be changed."""

    def __eq__(self, other: object) -> bool:
        """Whether they are the same in the same order: in another one another may decide."""
        if isinstance(other, Patterns):
            return [*self.items()] == [*other.items()]
        return dict.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((*self.items(),))

    def of(self, name: str) -> int | None:
        """What the first pattern that matches says; None if none does."""
        return next((number for pattern, number in self.items() if matches(name, pattern)), None)


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name matches, on every system with upper and lower case distinct."""
    return fnmatch.fnmatchcase(name, pattern)


def one_name(pattern: str) -> str:
    """A name that the pattern matches, unless it excludes letters."""
    of_sets = re.sub(r"\[(.)[^]]*\]", r"\1", pattern)
    return of_sets.replace("*", "any").replace("?", "x")


def require_matches(option: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise `UnmatchedPattern` for a pattern that matches none of these names. Without names there
    is nothing to miss: Optax makes a state for an empty tree, to see how it is built."""
    names = list(names)
    for pattern in patterns if names else ():
        if not any(matches(name, pattern) for name in names):
            raise UnmatchedPattern(option, pattern, names)


def chosen(option: str, patterns: str | Iterable[str] | None, names: Iterable[str]) -> set[str]:
    """Those of these names that a pattern matches, or one of several; all of them if there is none.
    Raises `UnmatchedPattern`."""
    names = list(names)
    if patterns is None:
        return set(names)
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    require_matches(option, patterns, names)
    return {name for name in names if any(matches(name, pattern) for pattern in patterns)}
