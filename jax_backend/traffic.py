"""What a traced function sends, read from its jaxpr.

The compiled program is the wrong place to count: XLA merges independent all-reduces, and on CPU it
widens bfloat16 payloads. The jaxpr says what was asked for, and needs no devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from gradwire.core.plan.traffic import Traffic
from gradwire.jax_backend.axes.mapped_axis import AGREED
from gradwire.jax_backend.axes.replica_groups import MESSAGE

#: JAX's name of a collective → ours. `psum` takes other names while JAX tracks what varies.
_KINDS = {
    "psum": "all_reduce",
    "psum2": "all_reduce",
    "psum_invariant": "all_reduce",
    "unreduced_psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "permute",
    "pgather": "gather",
}

#: Of the first two an all-reduce is made; the third sends as much as either.
_HALVES = ("reduce_scatter", "all_gather", "all_to_all")


@dataclass(frozen=True)
class Collective:
    """One collective: of one array, or of several of one dtype that gradwire sends together.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute" or "gather".
        dtype: of the payload.
        nbytes: of the payload on one replica: of an all-gather, what it results in; of anything
            else, what is handed in. Of all arrays together.
        axes: the names it runs over.
        branches: the branches of `lax.cond` (or `switch`) it lies in, outermost first, as (number
            of the cond, number of the branch). Conds that hold collectives are numbered in the
            order of the program. A false predicate takes branch 0. Empty: it always happens.
        repeats: how many times a `scan` runs it in all. None inside a `while`.
    """

    kind: str
    dtype: str
    nbytes: int
    axes: tuple[str, ...]
    branches: tuple[tuple[int, int], ...] = ()
    repeats: int | None = 1


def collective_traffic(
    fn: Callable[..., Any], *args: Any, axis_env: Sequence[tuple[str, int]] = ()
) -> tuple[Collective, ...]:
    """The collectives of a function, read from its jaxpr: what it sends, before any compiler.

        # The function that is given to pmap or shard_map.
        sent = collective_traffic(train_step, state, batch, axis_env=[("data", 4)])
        sent = collective_traffic(jax.pmap(train_step, axis_name="data"), states, batches)

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gradwire.jax_backend import collective_traffic, total_traffic
        >>> mean = lambda x: jax.lax.pmean(x, "data")
        >>> sent = collective_traffic(mean, jnp.ones(8), axis_env=[("data", 4)])
        >>> [(each.kind, each.dtype, each.nbytes) for each in sent], total_traffic(sent).nbytes
        ([('all_reduce', 'float32', 32)], 32)

    Args:
        fn: traced, not run. May be jitted, mapped, or a plain function that uses an axis of
            `axis_env`.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        axis_env: names and sizes of mapped axes that `fn` uses and does not bind itself. Needs no
            devices.

    Returns:
        Every collective in the order of the program: one entry for what gradwire sends together,
        and one for each array of anything else. `total_traffic` adds them up.
    """
    closed = jax.make_jaxpr(fn, axis_env=list(axis_env))(*args)
    return tuple(_walk(closed.jaxpr, (), 1, itertools.count()))


def total_traffic(
    collectives: Iterable[Collective], taken: Mapping[int, int] | None = None
) -> Traffic:
    """What is sent in one call: the count and the bytes that `gradwire.plan` predicts, where a
    reduce-scatter, an all-gather or an all-to-all, which sends half of what an all-reduce does,
    counts half of its payload (`gradwire.Traffic`).

    Examples:
        >>> from gradwire.jax_backend import Collective, total_traffic
        >>> first = Collective("all_reduce", "float32", 32, ("data",))
        >>> second = Collective("all_gather", "float32", 64, ("data",))
        >>> total_traffic([first, second]).nbytes
        64

    Args:
        collectives: from `collective_traffic`.
        taken: number of a cond → number of the branch that is taken, for those that hold
            collectives.

    Raises:
        ValueError: a collective lies in a cond that `taken` does not decide, or in a `while`.
    """
    count = nbytes = 0
    for c in collectives:
        undecided = [cond for cond, _ in c.branches if cond not in (taken or {})]
        if undecided:
            raise ValueError(
                f"{c} lies in cond {undecided[0]}: say which branch is taken,"
                f" taken={{{undecided[0]}: …}}"
            )
        if c.repeats is None:
            raise ValueError(f"{c} lies in a while loop, which runs nobody knows how often")
        if all((taken or {})[cond] == branch for cond, branch in c.branches):
            count += c.repeats
            nbytes += c.repeats * (-(-c.nbytes // 2) if c.kind in _HALVES else c.nbytes)
    return Traffic(count, nbytes)


def _walk(
    jaxpr: Any, branches: tuple[tuple[int, int], ...], repeats: int | None, conds: Iterator[int]
) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if eqn.params.get("name") == AGREED:
            continue  # There is none but under `jax.vmap`.
        if name in _KINDS:
            yield from _collectives(eqn, _KINDS[name], branches, repeats)
        elif name == "cond":
            sides = [branch.jaxpr for branch in eqn.params["branches"]]
            if eqn.params.get("branches_platforms"):
                # One program for each platform. What a step sends is that of the last, which is all
                # platforms' but those named before.
                yield from _walk(sides[-1], branches, repeats, conds)
            elif any(True for side in sides for _ in _walk(side, (), None, itertools.count())):
                cond = next(conds)
                for number, side in enumerate(sides):
                    yield from _walk(side, (*branches, (cond, number)), repeats, conds)
        else:
            inside = repeats
            if name == "scan" and repeats is not None:
                inside = repeats * eqn.params["length"]
            elif name == "while":
                inside = None
            found = (
                c
                for inner in _jaxprs(eqn.params.values())
                for c in _walk(inner, branches, inside, conds)
            )
            yield from _joined(found) if eqn.params.get("name") == MESSAGE else found


def _joined(collectives: Iterable[Collective]) -> Iterator[Collective]:
    """Those that differ in nothing but their size as one."""
    sizes: dict[Collective, int] = {}
    for c in collectives:
        kind = replace(c, nbytes=0)
        sizes[kind] = sizes.get(kind, 0) + c.nbytes
    for kind, nbytes in sizes.items():
        yield replace(kind, nbytes=nbytes)


def _collectives(
    eqn: Any, kind: str, branches: tuple[tuple[int, int], ...], repeats: int | None
) -> Iterator[Collective]:
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = tuple(
        a for a in (names if isinstance(names, (tuple, list)) else (names,)) if isinstance(a, str)
    )
    for variable in eqn.outvars if kind == "all_gather" else eqn.invars:
        aval = variable.aval
        nbytes = aval.size * aval.dtype.itemsize
        if axes and nbytes:
            yield Collective(kind, aval.dtype.name, nbytes, axes, branches, repeats)


def _jaxprs(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _jaxprs(value)
        elif hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
            yield value.jaxpr
