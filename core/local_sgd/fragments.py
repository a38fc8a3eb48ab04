"""Which parameters are averaged together: the fragments of Streaming DiLoCo (Douillard et al. 2025,
arXiv 2501.18512, section 2.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from gradwire.core.ops import Spec
from gradwire.core.text.name_patterns import matches

#: "strided", "contiguous" or "size"; or one pattern of names for each fragment.
Layout = Literal["strided", "contiguous", "size"] | tuple[str, ...]

_NUMBER = re.compile(r"\d+")
#: What a sharded model adds to the name of a parameter for the rows that a rank has of it.
_BLOCK = re.compile(r"\[[\d:, ]+\]$")


def layers(names: Sequence[str]) -> list[list[str]]:
    """The layers of a model, in order: what shares a name up to its first number, ordered by that
    number, and any other tensor by itself.

    Examples:
        >>> layers(["Block_10/w", "Block_2/w", "Block_2/b", "embed"])
        [['Block_2/b', 'Block_2/w'], ['Block_10/w'], ['embed']]
    """
    found: dict[tuple[str, int, str], list[str]] = {}
    for name in sorted(names):
        found.setdefault(layer_of(name), []).append(name)
    return [found[key] for key in sorted(found)]


def layer_of(name: str) -> tuple[str, int, str]:
    """What the names of a layer have in common: all before their first number; how many digits this
    has, -1 where there is none; and which. Its order is that of the numbers, of which Python makes
    no `int` where they are very long."""
    number = _NUMBER.search(_BLOCK.sub("", name))
    if number is None:
        return name, -1, ""
    digits = number.group().lstrip("0")
    return name[: number.start()], len(digits), digits


def fragments_of(specs: Mapping[str, Spec], count: int, layout: Layout) -> list[list[str]]:
    """The names in each of `count` fragments. They depend on names and sizes alone, not on the
    order of the parameters.

    Raises:
        ValueError: fewer layers (or parameters) than fragments; a name that no pattern matches; a
            pattern whose fragment would be empty.
    """
    if count == 1:
        return [list(specs)]
    if isinstance(layout, tuple):
        number_of = _by_pattern(list(specs), layout)
    elif layout == "size":
        if count > len(specs):
            raise ValueError(
                f"fragments={count} of {len(specs)} parameters; each needs at least one"
            )
        number_of = _by_size(specs, count)
    else:
        found = layers(list(specs))
        if count > len(found):
            raise ValueError(
                f"fragments={count} of {len(found)} layers (what shares a name up to its first"
                " number); use fewer, or layout='size', which divides tensors and not layers"
            )
        number_of = {
            name: i % count if layout == "strided" else i * count // len(found)
            for i, layer in enumerate(found)
            for name in layer
        }
    return [[name for name in specs if number_of[name] == i] for i in range(count)]


def _by_pattern(names: Sequence[str], patterns: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for name in names:
        number = next((i for i, pattern in enumerate(patterns) if matches(name, pattern)), None)
        if number is None:
            raise ValueError(
                f"layout={patterns!r} matches no parameter {name!r}; add '*' as the last pattern"
                " for the rest"
            )
        found[name] = number
    used = set(found.values())
    for number, pattern in enumerate(patterns):
        if number not in used:
            raise ValueError(f"layout={patterns!r}: no parameter is left for {pattern!r}")
    return found


def _by_size(specs: Mapping[str, Spec], count: int) -> dict[str, int]:
    filled, number_of = [0] * count, dict[str, int]()
    for name in sorted(specs, key=lambda n: (-specs[n].nbytes, n)):
        number_of[name] = min(range(count), key=lambda i: filled[i])
        filled[number_of[name]] += max(specs[name].nbytes, 1)
    return number_of
