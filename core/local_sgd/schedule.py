"""When replicas that train by themselves meet, and who meets whom: post-local SGD (Lin et al. 2018,
arXiv 1808.07217), hierarchical averaging, staggered fragments (Douillard et al. 2025, "Streaming
DiLoCo", arXiv 2501.18512). No arrays and no communication here.

Steps are numbered from 0. Until step K (`start_step`) all replicas average their *gradients*; from
then on each steps by itself, or with its subgroup, and *parameters* are averaged after every H-th
such step (`period`): after the steps K+H-1, K+2H-1, …
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from gradwire.core.local_sgd.fragments import Layout, fragments_of
from gradwire.core.ops import Spec
from gradwire.core.protocol.groups import Groups
from gradwire.core.text.options import AtLeast0, AtLeast1, check_options
from gradwire.core.text.wording import configured

#: Who averages together: groups of so many consecutive replicas; those of a machine; all; or the
#: groups themselves.
Members = AtLeast1 | Groups | Literal["node", "all"]


@dataclass(frozen=True)
class Level:
    """Replicas that average together every `period` steps. `groups` is a partition of the replicas,
    None for all of them together."""

    groups: Groups | None
    period: int


@dataclass(frozen=True)
class Turn:
    """What happens after one step, where the host knows its number: an average is then no branch of
    a compiled program.

    Attributes:
        begins: the replicas' own ways begin here.
        due: (period, fragment) that are due.
        arrives: fragments whose averages are taken now, and left before.
        later: fragments that have been averaged before.
    """

    begins: bool
    due: frozenset[tuple[int, int]]
    arrives: frozenset[int]
    later: frozenset[int]


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """One object for both who averages gradients and who averages parameters, so that they cannot
    disagree.

    Args:
        period: H, steps from one average of the parameters to the next. Or a hierarchy, who
            averages → period: `{2: 2, 8: 16}` averages in pairs after every second step, and among
            all 8 replicas after every 16th. The largest groups that are due win. Who averages is a
            number of consecutive replicas, "node", "all", or a partition such as `((0, 2), (1,
            3))`; the largest are all replicas.
        start_step: K, number of steps that average gradients over all replicas first.
        subgroup: who averages gradients from step K on: a number of consecutive replicas, "node",
            or a partition. None: nobody, each replica steps on its own gradient.
        fragments: cut the parameters in so many parts, which are averaged at evenly spaced steps of
            a period instead of all at once: the peak of what is sent shrinks, its sum stays.
        layout: which parameters are a fragment: "strided", layers 0, P, 2P, … together (a layer is
            what shares a name up to its first number); "contiguous" layers; tensors by "size", so
            that fragments are about equal; or a tuple with one pattern of names for each fragment,
            of which the first that matches decides.

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    period: AtLeast1 | Mapping[Members, AtLeast1] = field(kw_only=False)
    start_step: AtLeast0 = 0
    subgroup: Members | None = None
    fragments: AtLeast1 = 1
    layout: Layout = "strided"

    #: What is said of one in an algorithm's place.
    instead = (
        "is local SGD and no algorithm: local_sgd(…) trains with it, LocalSimulator(…) runs it in"
        " NumPy; a compressor of it is an algorithm"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self._hierarchy():
            raise ValueError(
                "period={} averages nobody; give who averages → period, or one number for all"
                " replicas"
            )
        if isinstance(self.layout, tuple) and len(self.layout) != self.fragments:
            raise ValueError(
                f"layout={self.layout!r} has {len(self.layout)} patterns for"
                f" fragments={self.fragments}; give one for each"
            )
        shortest = self.periods[-1]
        if self.fragments > shortest:
            raise ValueError(
                f"fragments={self.fragments} do not fit in a period of {shortest} steps: at most"
                " one is sent after each; use fewer, or a longer period"
            )

    def __repr__(self) -> str:
        return configured(self)

    def _hierarchy(self) -> Mapping[Members, int]:
        return self.period if isinstance(self.period, Mapping) else {"all": self.period}

    @property
    def cycle(self) -> int:
        """The number of steps after which averages repeat: the least common multiple of the
        periods."""
        return math.lcm(*self.periods)

    @property
    def periods(self) -> tuple[int, ...]:
        """The periods of all levels, the longest first."""
        return tuple(sorted(set(self._hierarchy().values()), reverse=True))

    @property
    def longest(self) -> int:
        """H, the period of the average among all replicas."""
        return self.periods[0]

    @property
    def mentions_nodes(self) -> bool:
        """Whether "node" is to be replaced, see `on_nodes_of`."""
        return self.subgroup == "node" or "node" in self._hierarchy()

    @property
    def some_replicas(self) -> int:
        """A number of replicas that the schedule fits: what each sends does not depend on it,
        unless a compressor gathers."""
        named = [*self._hierarchy(), self.subgroup]
        sizes = [who for who in named if isinstance(who, int)]
        partitioned = [sum(map(len, who)) for who in named if isinstance(who, tuple)]
        if partitioned:
            return partitioned[0]
        return math.lcm(*sizes) * (2 if "all" in named else 1)

    @property
    def names_replicas(self) -> bool:
        """Whether the schedule itself says of how many replicas it is."""
        named = [*self._hierarchy(), self.subgroup]
        return "all" not in named or any(isinstance(who, tuple) for who in named)

    def on_nodes_of(self, near: int | Groups) -> Self:
        """The schedule with "node" replaced, by the number of replicas on each machine, or by a
        partition of the replicas. Raises ValueError as the class does."""
        period = self.period
        if isinstance(period, Mapping) and "node" in period:
            if near in period:
                raise ValueError(
                    f"period={dict(period)!r} names groups of {near}, the size of a node, twice"
                )
            period = {(near if who == "node" else who): steps for who, steps in period.items()}
        return replace(
            self, period=period, subgroup=near if self.subgroup == "node" else self.subgroup
        )

    @functools.cached_property
    def _levels(self) -> dict[int, tuple[Level, ...]]:
        """What `levels` has found for so many replicas: it is asked at every step."""
        return {}

    def levels(self, replicas: int) -> tuple[Level, ...]:
        """The hierarchy for so many replicas, largest groups first. The first is all replicas.

        Raises:
            ValueError: a size that does not divide them, a partition of other replicas, "node"
                where nobody knows what that is, groups that never come to their turn, or nobody who
                averages all replicas.
        """
        if replicas not in self._levels:
            self._levels[replicas] = self._levels_of(replicas)
        return self._levels[replicas]

    def _levels_of(self, replicas: int) -> tuple[Level, ...]:
        named = [
            (_partition("period", who, replicas), steps) for who, steps in self._hierarchy().items()
        ]
        named.sort(key=lambda level: (max(map(len, level[0])), level[1]), reverse=True)
        sizes = [max(map(len, groups)) for groups, _ in named]
        if sizes[0] != replicas:
            raise ValueError(
                f"period={self.period!r} averages groups of {sizes[0]} at most, so the {replicas}"
                " replicas would drift apart; add 'all' with a longer period"
            )
        for i in range(1, len(named)):
            # A schedule for several nodes holds on one as well, where "node" and "all" are all
            # replicas: they average at both periods.
            if sizes[i] == sizes[i - 1] < replicas:
                raise ValueError(
                    f"period={self.period!r} has groups of {sizes[i]} of {replicas} replicas twice"
                )
            if named[i][1] >= named[i - 1][1]:
                raise ValueError(
                    f"period={self.period!r}: groups of {sizes[i]} must average more often than the"
                    f" larger ones of {sizes[i - 1]}, which win where both are due"
                )
        return tuple(Level(None if len(groups) == 1 else groups, steps) for groups, steps in named)

    def subgroups(self, replicas: int) -> Groups | None:
        """Who averages gradients from `start_step` on, as a partition; None if nobody does. Raises
        ValueError like `levels`."""
        if self.subgroup is None:
            return None
        groups = _partition("subgroup", self.subgroup, replicas)
        return None if max(map(len, groups)) == 1 else groups

    def due(self, step: Any, period: int, fragment: Any = 0) -> Any:
        """Whether groups of this period average this fragment after the update of step `step`. A
        bool, or traced if `step` is; of an array of fragments an array.

        This looks at one level of the hierarchy: the caller asks the largest first.
        """
        local_steps = step + 1 - self.start_step
        return (step >= self.start_step) & (
            local_steps % period == self._offset(period, fragment) % period
        )

    def acting_steps(self, replicas: int) -> list[int]:
        """The steps of a cycle, from `start_step` on, after which something is averaged. Raises
        ValueError like `levels`."""
        self.levels(replicas)
        return self.steps_due(1)

    def steps_due(self, cycles: int) -> list[int]:
        """The steps of so many cycles, from `start_step` on, after which something is averaged,
        whoever averages it."""
        local_steps = {
            t
            for period in self.periods
            for fragment in range(self.fragments)
            for t in range(self._offset(period, fragment), cycles * self.cycle + 1, period)
        }
        return [self.start_step + t - 1 for t in sorted(local_steps)]

    def round(self, step: Any, period: int, fragment: Any = 0) -> Any:
        """How often the fragment has been averaged by these groups before, at a step when it is
        due."""
        return (step + 1 - self.start_step - self._offset(period, fragment)) // period

    def _offset(self, period: int, fragment: Any) -> Any:
        if isinstance(fragment, int):
            return (fragment + 1) * period // self.fragments
        return np.array([self._offset(period, int(f)) for f in fragment], np.int32)

    def occasions(self, replicas: int, rounds: int = 1, after: int = 0) -> list[tuple[int, int]]:
        """Every kind of step: one step of it, and how many of a cycle there are. Steps are of one
        kind if the same fragments are averaged by the same groups, and those of all replicas in the
        same of `rounds` rounds that alternate. It takes no longer for a longer period.

        Args:
            replicas: how many there are.
            rounds: the cycle is so many times as long.
            after: so many rounds of all replicas come before.

        Raises:
            ValueError: like `levels`.
        """
        periods = [level.period for level in self.levels(replicas)]
        moduli = [periods[0] * rounds, *periods[1:]]
        residues = [
            [
                (self._offset(p, fragment) + p * i) % n
                for i in range(n // p)
                for fragment in range(self.fragments)
            ]
            for p, n in zip(periods, moduli, strict=True)
        ]
        # Which levels have their turn together, by the residues of their steps: first how many
        # steps have at least these turns, then no others.
        found: dict[tuple[tuple[int, int], ...], tuple[int, int]] = {(): (0, 1)}
        for level, (n, own) in enumerate(zip(moduli, residues, strict=True)):
            for turns, common in list(found.items()):
                for residue in own:
                    if (both := _in_common(*common, residue, n)) is not None:
                        found[*turns, (level, residue)] = both
        count = {turns: self.cycle * rounds // n for turns, (_, n) in found.items()}
        for turns in sorted(found, key=len, reverse=True):
            for k in range(len(turns)):
                for fewer in itertools.combinations(turns, k):
                    count[fewer] -= count[turns]
        first, kinds = periods[0] * after + 1, []
        for turns in [turns for turns in found if count[turns]]:
            residue, n = found[turns]
            others = [i for i in range(len(moduli)) if i not in dict(turns)]
            start = first + (residue - first) % n
            local_step = next(
                t
                for t in itertools.count(start, n)
                if all(t % moduli[i] not in residues[i] for i in others)
            )
            kinds.append((local_step + self.start_step - 1, count[turns]))
        return kinds

    def parts(self, specs: Mapping[str, Spec]) -> list[list[str]]:
        """The names in each fragment, see `fragments_of`, which says what raises."""
        return fragments_of(specs, self.fragments, self.layout)


def _in_common(a: int, m: int, b: int, n: int) -> tuple[int, int] | None:
    """The numbers that are `a` modulo `m` and `b` modulo `n`, as a residue and its modulus; None:
    there are none."""
    g = math.gcd(m, n)
    if (b - a) % g:
        return None
    return (a + m * ((b - a) // g * pow(m // g, -1, n // g) % (n // g))) % (m // g * n), m // g * n


def _partition(what: str, who: Members, replicas: int) -> Groups:
    if who == "node":
        raise ValueError(
            f"{what} says 'node', but not how many replicas that is; call `on_nodes_of(size)` first"
        )
    if isinstance(who, tuple):
        if sorted(m for members in who for m in members) != list(range(replicas)):
            raise ValueError(
                f"{what} has groups {who}, which are no partition of the replicas 0 to"
                f" {replicas - 1}"
            )
        return who
    size = replicas if who == "all" else who
    assert isinstance(size, int)
    if replicas % size:
        raise ValueError(
            f"{what} has groups of {size}, but {replicas} replicas cannot be divided so; use a"
            f" divisor of {replicas}"
        )
    return tuple(tuple(range(first, first + size)) for first in range(0, replicas, size))
