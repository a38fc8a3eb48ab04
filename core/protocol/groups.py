"""Partitions of the replicas into groups, each of which asks by itself."""

from __future__ import annotations

from collections.abc import Sequence

#: A partition of the replicas, by number: `((0, 1), (2, 3))`.
Groups = tuple[tuple[int, ...], ...]


class UnknownWorldSize(ValueError):
    """What an algorithm sends depends on the number of replicas, and nobody has said it."""

    def __init__(self) -> None:
        super().__init__(
            "what this algorithm sends depends on the number of replicas; say it: plan(…,"
            " world_size=8)"
        )


class NoPartition(ValueError):
    """Groups of other replicas than there are. `members`: how many are in them."""

    def __init__(self, groups: Groups, replicas: int, what: str = "groups") -> None:
        super().__init__(f"{what}={groups} are no partition of the replicas 0 to {replicas - 1}")
        self.members = sum(map(len, groups))


def require_partition(groups: Groups, replicas: int, *, equal: bool = False) -> None:
    """Raise ValueError for groups that are no partition of so many replicas; with `equal`, for
    groups of several sizes."""
    if sorted(member for members in groups for member in members) != list(range(replicas)):
        raise NoPartition(groups, replicas)
    if equal:
        group_size(groups, replicas)


def group_size(groups: Groups | None, world_size: int | None) -> int:
    """How many replicas gather together. Raises ValueError for groups of several sizes, and where
    nobody has said how many there are."""
    if groups is not None:
        sizes = {len(members) for members in groups}
        if len(sizes) > 1:
            raise ValueError(
                f"groups={groups} differ in size, so what they gather would differ in shape"
            )
        return sizes.pop()
    if world_size is None:
        raise UnknownWorldSize
    return world_size


def members_of(
    groups: Groups | None, replicas: int, *, equal: bool = False
) -> Sequence[Sequence[int]]:
    """The replicas of each group; without groups, of the one that all are in. Raises as
    `require_partition`."""
    if groups is None:
        return (range(replicas),)
    require_partition(groups, replicas, equal=equal)
    return groups


def as_number(groups: Groups) -> int | Groups:
    """How many replicas are in each group, where all have equally many, one after the other; else
    the groups.

    Examples:
        >>> from gradwire.core.protocol.groups import as_number
        >>> as_number(((0, 1), (2, 3))), as_number(((0, 2), (1, 3)))
        (2, ((0, 2), (1, 3)))
    """
    size = len(groups[0])
    in_order = tuple(
        tuple(range(first, first + size)) for first in range(0, size * len(groups), size)
    )
    return size if groups == in_order else groups
