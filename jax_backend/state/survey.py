"""A state, walked through once: its arrays with what their paths say, and what the refusals need to
know.

Types are gone from what a checkpoint gives that was restored into nothing, and keys are not: so all
but optax's chains is found by its keys.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradwire.jax_backend.axes.mapped_axis import AxisName, axes_of
from gradwire.jax_backend.state.types import (
    ACCOUNT,
    AVERAGES,
    COMMON,
    LAYOUT,
    MARK,
    MEMORY,
    PIECES,
    PLACED,
    RECORD,
    SHARDED,
    UPDATES,
    WRONG_TURNS,
    DataParallelState,
    PerReplica,
    Record,
    is_placed,
    known_number,
    layout_in,
    path_of,
)

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """An array of a state.

    Attributes:
        path, value: as JAX gives them.
        keys: of the path, as text.
        marks: how many of them are marks: 0 of what is equal on all replicas, 2 of what is marked
            itself in a state that is marked as a whole.
        of: the key whose mark it bears, the innermost: `PIECES`, `LOCAL`, `RECORD` or `PLACED`; ""
            if none does.
    """

    path: Any
    value: Any
    keys: Keys
    marks: int
    of: str

    @property
    def name(self) -> str:
        """Its path, joined by "."."""
        return path_of(self.path)

    @property
    def placement(self) -> bool:
        """Whether it says where the state has come to: a `place_mark`."""
        return self.of in (RECORD, PLACED)

    @property
    def equal_everywhere(self) -> bool:
        """Whether it begins equal on all replicas: what is not marked; and of local SGD, under
        which all is marked, what its averages begin with."""
        return not self.marks or (
            self.marks == 1 and (AVERAGES, MEMORY) in itertools.pairwise(self.keys)
        )


@dataclass(frozen=True)
class LocalCounts:
    """What a state of `local_sgd` counts; None: traced, or known by shapes alone.

    Attributes:
        path: of the state.
        accumulated: whether it is inside `optax.MultiSteps`.
        updates, averages, wrong_turns: see `LocalSGDState`.
    """

    path: str
    accumulated: bool
    updates: int | None
    averages: int | None
    wrong_turns: int | None


@dataclass(frozen=True)
class Survey:
    """What `survey` has found.

    Attributes:
        state: as given.
        leaves: its arrays, in JAX's order.
        marks: paths of all marks, also of those that hold nothing.
        records: of our transformations, by the path of each.
        chains: of optax that hold one of ours.
        mixtures: the states of `optax.multi_transform`.
        conditional: those of `optax.conditionally_transform`.
        layouts: of sharded optimizers' states, by the path of each.
    """

    state: Any
    leaves: list[Leaf] = field(default_factory=list)
    marks: list[Keys] = field(default_factory=list)
    records: list[tuple[Keys, Record]] = field(default_factory=list)
    chains: list[tuple[Any, ...]] = field(default_factory=list)
    mixtures: list[Any] = field(default_factory=list)
    conditional: list[Any] = field(default_factory=list)
    layouts: dict[Keys, str] = field(default_factory=dict)

    def map(self, change: Callable[[Leaf], Any]) -> Any:
        """The state with something else in place of each array."""
        return jax.tree.unflatten(
            jax.tree.structure(self.state), [change(leaf) for leaf in self.leaves]
        )

    def _wrappers(self, sign: str, inner: str) -> dict[Keys, Keys]:
        """Paths of the nodes that have a key `sign`, and one of our transformations below their key
        `inner` → a path in its state."""
        # A transformation that has no memory has the mark all the same, and nothing below it;
        # without types, its account tells.
        paths = [*(leaf.keys for leaf in self.leaves), *self.marks]
        nodes = {path[: path.index(sign)] for path in paths if sign in path}
        return {
            n: path
            for n in nodes
            for path in reversed(paths)
            if path[: len(n) + 1] == (*n, inner)
            and (MARK in path[len(n) :] or ACCOUNT in itertools.pairwise(path[len(n) :]))
        }

    def refuse_skipped_steps(self) -> None:
        """Raise ValueError for a transformation inside one that leaves steps out on a replica whose
        gradients are not finite, and not on others: by `optax.apply_if_finite`, or by
        `optax.MultiSteps` if told to."""
        for node, memory in self._wrappers("skip_state", "inner_opt_state").items():
            if MARK in node:
                continue  # Under local SGD each replica steps by itself.
            raise ValueError(
                f"the transformation with the memory {'.'.join(memory)} is inside"
                " optax.MultiSteps(should_skip_update_fn=…), which decides on each replica by"
                " itself: others average without it, or wait for it forever. Accumulate inside the"
                " training step (jax.lax.scan over micro-batches): a step that is not finite is"
                " then skipped on all replicas"
            )
        for memory in self._wrappers("notfinite_count", "inner_state").values():
            raise ValueError(
                f"the transformation with the memory {'.'.join(memory)} is inside"
                " optax.apply_if_finite: if one replica's gradients hold an inf or NaN, the others"
                " wait for it forever. Put it after: optax.chain(power_sgd(...),"
                " optax.apply_if_finite(optimizer, ...)), or give zero(...) skip_non_finite=True"
            )

    def refuse_tuned_outside(self) -> None:
        """Raise ValueError for a transformation inside `optax.contrib.mechanize`, which tunes the
        learning rate by gradients as they come to it: by those of each replica alone."""
        for memory in self._wrappers("x0", "base_optimizer_state").values():
            raise ValueError(
                f"the transformation with the memory {'.'.join(memory)} is inside"
                " optax.contrib.mechanize, which sees gradients before they are averaged, and goes"
                " another way on each replica. Put it behind: optax.chain(power_sgd(...),"
                " optax.contrib.mechanize(optimizer))"
            )

    def refuse_conditional(self) -> None:
        """Raise ValueError for a transformation inside `optax.conditionally_transform`, which hands
        on gradients as they came in the steps that it leaves out."""
        for outer in self.conditional:
            for memory in survey(outer).marks[:1]:
                raise ValueError(
                    f"the transformation with the memory {'.'.join(memory)} is inside"
                    " optax.conditionally_transform, which hands on each replica's own gradients"
                    " where its predicate is False: replicas drift apart. Put it before:"
                    " optax.chain(power_sgd(...), optax.conditionally_transform(optimizer, ...));"
                    " its start_step= begins compression late"
                )

    def refuse_accumulated(self, *, half: bool = False) -> None:
        """Raise ValueError for a transformation inside `optax.MultiSteps`; `half`: only if that has
        accumulated something."""
        # Where everything has an axis for the replicas, accumulated gradients have one too.
        wrappers = {
            n: path
            for n, path in self._wrappers("acc_grads", "inner_opt_state").items()
            if MARK not in n
        }
        if not half:
            for memory in wrappers.values():
                raise ValueError(
                    f"the transformation with the memory {'.'.join(memory)} is inside"
                    " optax.MultiSteps, which accumulates gradients that differ between replicas"
                    " in an array that has no axis for them. Accumulate inside the training step"
                    " (jax.lax.scan over micro-batches), or use jax.pmap"
                )
        counts = {(*node, "mini_step") for node in wrappers}
        for leaf in self.leaves:
            if any(leaf.keys[: len(count)] == count for count in counts) and np.any(
                np.asarray(leaf.value)
            ):
                raise ValueError(
                    f"{'.'.join(leaf.keys)} is not 0: optax.MultiSteps holds gradients that differ"
                    " between replicas and would be lost. Take the state after a whole number of"
                    " accumulations"
                )

    def refuse_unmarked(self) -> None:
        """Raise ValueError for a state of local SGD that `stack_replicas` has not marked as a
        whole."""
        placed = [leaf for leaf in self.leaves if leaf.of == PLACED]
        # its own mark aside
        bare = [leaf for leaf in self.leaves if leaf.marks == (leaf.of == PLACED)]
        if placed and bare:
            other = next((leaf for leaf in bare if leaf.of != PLACED), placed[0])
            raise ValueError(
                f"{placed[0].name} belongs to local SGD, under which every array differs between"
                f" replicas, and {other.name} is not marked as one that does. Mark the whole state"
                " once, state = stack_replicas(state), and take it apart in the training step:"
                " mine = this_replica(state)"
            )

    @property
    def ensemble(self) -> Leaf | None:
        """The mark of a state of which `jax.vmap` has made several, one for each member, or a piece
        of such a sharded optimizer; None of any other."""
        pieces = filter(None, map(self._piece_of_members, self._sharded()))
        marks = (
            x
            for x in self.leaves
            if x.placement and np.ndim(x.value) == 2 and not is_placed(x.value)
        )
        return next(pieces, None) or next(marks, None)

    def _sharded(self) -> set[Keys]:
        """Paths of the sharded optimizers' states. Under local SGD each replica has one of its
        own."""
        return {leaf.keys[:-3] for leaf in self.leaves if leaf.of == PIECES and leaf.marks == 1}

    def _piece_of_members(self, node: Keys) -> Leaf | None:
        """A piece in which rows of replicas follow an axis that all arrays of this sharded
        optimizer have in front. Its layout tells. A state that has lost that, as one that was
        restored into nothing, is told by shapes, where they can: between the axis of the replicas
        and the last one a piece of a parameter has axes of 1 alone, and a stack says of how many
        replicas it is."""
        pieces = [leaf for leaf in self.leaves if leaf.keys[:-2] == (*node, PIECES)]
        if node in self.layouts:
            of, first = layout_in(self.layouts[node])[0], np.shape(pieces[0].value)
            # In pmap form each device has one row.
            members = first[1:2] == (of,) if of > 1 else first[0] > 1
            return pieces[0] if members and self._has_axis_in_front(node) else None
        common = [
            leaf.value for leaf in self.leaves if leaf.keys[: len(node) + 1] == (*node, COMMON)
        ]
        first = {np.shape(x)[:1] for x in (*common, *(leaf.value for leaf in pieces))}
        second = {np.shape(leaf.value)[1:2] for leaf in pieces}
        if len(first) > 1 or len(second) > 1 or second <= {(), (1,)}:
            return None
        (members,), (replicas,) = *first, *second
        counted = any(
            np.shape(x) == (members,) and jnp.issubdtype(x.dtype, np.integer) for x in common
        )
        for leaf in pieces:
            names = re.search(r"\{(.*)\}", leaf.keys[-1])
            stack = (
                names
                and len(re.split("[|;]", names[1])) == replicas
                and (members != replicas or counted)
            )
            if stack if names else np.ndim(leaf.value) > 2:
                return leaf
        return None

    def _has_axis_in_front(self, node: Keys) -> bool:
        """Whether the pieces of a sharded optimizer's state with a layout have one axis more than
        in its local or global form."""
        held = sum(np.ndim(leaf.value) for leaf in self.leaves if leaf.keys[:-2] == (*node, PIECES))
        return held > layout_in(self.layouts[node])[1]

    def refuse_ensemble(self) -> None:
        """Raise ValueError for a state of several members."""
        if (mark := self.ensemble) is not None:
            shape = np.shape(mark.value)
            raise ValueError(
                f"{mark.name} has shape {shape}: the state is that of {shape[0]} members of an"
                " ensemble, made by jax.vmap, whose axis comes before that of the replicas. Make"
                " and place the state of each member by itself: [distribute(tx.init(params), mesh,"
                " axis_name) for params in members]"
            )

    def refuse_pmap_form(self) -> None:
        """Raise ValueError for a state with a device axis, or one of members."""
        self.refuse_ensemble()
        sharded = {
            node for node in self._sharded() & self.layouts.keys() if self._has_axis_in_front(node)
        }
        for leaf in self.leaves:
            if (
                leaf.keys[-2:] == ACCOUNT and not leaf.marks and np.ndim(leaf.value)
            ):  # of what has no memory this alone tells
                raise ValueError(
                    f"{leaf.name} has shape {np.shape(leaf.value)}: the state is in pmap form, or"
                    " that of several members of an ensemble. Give it unreplicate(state); of"
                    " members that of each, jax.tree.map(lambda x: x[0], state)"
                )
            if (leaf.placement and np.ndim(leaf.value) == 2) or (
                leaf.of == PIECES and leaf.keys[:-3] in sharded
            ):
                raise ValueError(
                    f"{leaf.name} has shape {np.shape(leaf.value)}: the state is in the form of"
                    " jax.pmap, with a device axis on every array. Bring it back first:"
                    " gradwire.jax_backend.unreplicate(state)"
                )

    def refuse_missed_averages(self) -> None:
        """Raise ValueError for a state of local SGD, of arrays, whose halves were not called
        equally often, or that was told a wrong turn."""
        for found in self.counts_of_local_sgd():
            if found.wrong_turns:
                raise ValueError(
                    "average_params of local SGD was told the turn of another step"
                    f" {found.wrong_turns} times: averages were taken when they were not due, or"
                    " not taken when they were, and replicas have parted. Go on from a state"
                    " before, with turns that begin where it is: for turn, batch in"
                    " zip(tx.turns(state), batches). To go on with this state none the less, set"
                    f" {found.path}.{WRONG_TURNS} to 0"
                )
            updates, averages = found.updates, found.averages
            if updates is None or averages is None:
                continue
            if updates > averages or (updates < averages and not found.accumulated):
                happened = (
                    "parameters were not averaged when it was time to, and replicas have trained"
                    " alone"
                    if updates > averages
                    else "parameters were averaged sooner than the period says"
                )
                raise ValueError(
                    f"update of local SGD was called {updates} times and average_params {averages}"
                    f" times: {happened}. Call params, opt_state = tx.average_params(params,"
                    " opt_state) in every training step, once, after optax.apply_updates. To go on"
                    f" with this state none the less, set {found.path}.{UPDATES} to {averages}"
                )

    def counts_of_local_sgd(self) -> list[LocalCounts]:
        """The counts of each state of `local_sgd`, with its types or without."""
        values = {leaf.keys: leaf.value for leaf in self.leaves}
        found = []
        for keys, updates in values.items():
            for at in (i for i, key in enumerate(keys) if key == UPDATES):
                before, after = keys[:at], keys[at + 1 :]
                if (*before, AVERAGES, "step", *after) not in values:
                    continue
                wrong = values.get((*before, WRONG_TURNS, *after), 0)
                counts = (updates, values[*before, AVERAGES, "step", *after], wrong)
                # Inside `optax.MultiSteps` there is an update for several averages.
                found.append(
                    LocalCounts(
                        ".".join(before), "inner_opt_state" in before, *map(known_number, counts)
                    )
                )
        return found

    def refuse_other_axis(self, axis_name: AxisName) -> None:
        """Raise ValueError for a state of a transformation along another axis."""
        for keys, record in self.records:
            # of an average of gradients nothing differs, if it remembers nothing
            if record.per_replica is None and not {LAYOUT, AVERAGES} & {*keys}:
                continue
            own, given = axes_of(record.axis_name), axes_of(axis_name)
            if own != given if record.ordered else {*own} != {*given}:
                what = "in that order" if {*own} == {*given} else "along that axis"
                raise ValueError(
                    f"axis_name={axis_name!r}, but the state is of a transformation with"
                    f" axis_name={record.axis_name!r}: its memory differs {what}, and would be"
                    f" lost. Give axis_name={record.axis_name!r} here, or make the state anew for"
                    " another axis"
                )

    def warn_of_chains(self) -> None:
        """Say what `update` of a transformation cannot see, and the state of the chain round it
        tells: moments of gradients that are not averaged yet, and parameters that a mask leaves to
        nobody."""
        for chain in self.chains:
            first = next(i for i, part in enumerate(chain) if _is_ours(part))
            before = next(filter(None, map(_moments, chain[:first])), None)
            if before is not None:
                warnings.warn(
                    f"{before} precedes the transformation that averages gradients in optax.chain:"
                    " its moments are those of one replica's gradients, differ between replicas,"
                    " and a checkpoint keeps those of the first. Put power_sgd(…),"
                    " all_reduce_mean(…) or average_gradients(…) first: optax.chain(power_sgd(…),"
                    " optax.adam(…)); and what a sharded optimizer is to divide inside it,"
                    " zero1(optax.adam(…), …)",
                    stacklevel=4,
                )
            masked = [part for part in chain if type(part).__name__ == "MaskedState"]
            if len(masked) == 1 and _is_ours(masked[0]) and not any(map(_averages, chain)):
                warnings.warn(
                    "optax.masked round the transformation that averages gradients, and nothing in"
                    " the chain for the parameters that are masked out: nobody averages their"
                    " gradients, and replicas drift apart. Average the rest as it is:"
                    " optax.chain(optax.masked(power_sgd(…), mask),"
                    " optax.masked(all_reduce_mean(axis_name=…), the_opposite_mask), …)",
                    stacklevel=4,
                )

    def warn_of_mixtures(self) -> None:
        """Say that one part of `optax.multi_transform` averages the gradients of its parameters,
        and another does not."""
        inside = sum(map(_averaging, self.mixtures))
        if inside < _averaging(self.state):
            return  # others average around it
        for mixture in self.mixtures:
            parts: dict[str, Any] = {
                str(label): getattr(part, "inner_state", part)
                for label, part in mixture.inner_states.items()
            }
            averaged = [label for label, part in parts.items() if _averaging(part)]
            rest = [
                label
                for label, part in parts.items()
                if not _averaging(part) and type(part).__name__ != "EmptyState"  # set_to_zero
            ]
            if averaged and rest:
                warnings.warn(
                    f"optax.multi_transform averages gradients of {averaged[0]!r} and not of"
                    f" {rest[0]!r}, whose replicas drift apart. Average all before it:"
                    " optax.chain(average_gradients(…), optax.multi_transform(…)); or in each part",
                    stacklevel=4,
                )


def survey(state: Any) -> Survey:
    """Walk through any tree with states of this library in it, of arrays or shapes."""
    found = Survey(state)

    def walk(tree: Any, path: tuple[Any, ...]) -> None:
        def stops(x: Any) -> bool:
            if type(x).__name__ in ("PartitionState", "MultiTransformState"):
                found.mixtures.append(x)
            if type(x).__name__ == "ConditionallyTransformState":
                found.conditional.append(x)
            if type(x) is tuple and any(map(_is_ours, x)):
                found.chains.append(x)
            return x is not tree and isinstance(x, PerReplica | Record)

        for inner, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)[0]:
            here = (*path, *inner)
            keys = tuple(map(_key, here))
            if isinstance(x, PerReplica):
                found.marks.append((*keys, MARK))
                walk(x, here)
            elif isinstance(x, Record):
                found.records.append((keys, x))
                if keys[-2:-1] == (LAYOUT,):
                    found.layouts[keys[:-2]] = keys[-1]
                walk(x, here)
            else:
                last = max((i for i, key in enumerate(keys) if key == MARK), default=0)
                found.leaves.append(
                    Leaf(here, x, keys, keys.count(MARK), keys[last - 1] if last else "")
                )

    walk(state, ())
    return found


def _is_ours(x: Any) -> bool:
    """Whether this averages gradients, or masks what does."""
    masks = type(x).__name__ == "MaskedState" and _averages(getattr(x, "inner_state", None))
    return masks or _averages(x)


def _averages(x: Any) -> bool:
    """Whether this is the state of what averages gradients."""
    if isinstance(x, DataParallelState):
        return True
    layout = getattr(x, LAYOUT, None) if getattr(x, "_fields", ()) == SHARDED else None
    return isinstance(layout, dict) and any(
        isinstance(place, Record) and place.averages for place in layout.values()
    )


def _averaging(state: Any) -> int:
    """How many in this state average gradients."""
    return sum(map(_averages, jax.tree.leaves(state, is_leaf=_averages)))


def _moments(part: Any) -> str | None:
    """The name of a state of optax in this part of a chain that holds more than numbers."""

    def holds(x: Any) -> bool:
        return (
            isinstance(x, tuple)
            and hasattr(x, "_fields")
            and type(x).__module__.startswith("optax")
        )

    for x in jax.tree.leaves(part, is_leaf=holds):
        if holds(x) and any(np.ndim(leaf) for leaf in jax.tree.leaves(x)):
            return type(x).__name__
    return None


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
