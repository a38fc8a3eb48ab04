"""Options that go by patterns of parameter names: `{"layers/*": 1, "*/kernel": 2}`, of which the first that matches decides."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

__all__ = ["Patterns", "matches", "require_matches"]


class Patterns(dict[str, int]):
    """Pattern (`fnmatch`, upper and lower case distinct) → number, in the order in which they are tried. Not to be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def of(self, name: str) -> int | None:
        """What the first pattern that matches says; None if none does."""
        return next((number for pattern, number in self.items() if matches(name, pattern)), None)


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name matches, on every system with upper and lower case distinct."""
    return fnmatch.fnmatchcase(name, pattern)


def require_matches(option: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise ValueError for a pattern that matches none of these names. Without names there is nothing to miss: Optax makes a state for an
    empty tree, to see how it is built."""
    names = list(names)
    for pattern in patterns if names else ():
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"{option} pattern {pattern!r} matches no parameter; the parameters are {', '.join(map(repr, names))}"
            )
