"""Does an optimizer treat each parameter by itself? Found out by trying it: on all parameters
together, and on those of each replica.

A replica that owns some whole parameters may run an optimizer on them if what comes out for one
depends on no other, and not on its name, under which each replica has a parameter of its own. What
mixes parameters, as a global norm does, comes to something else on a part of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from gradwire.core.ops import Spec
from gradwire.core.zero.stacks import StackShards
from gradwire.jax_backend.axes.mapped_axis import AxisName
from gradwire.jax_backend.state.types import by_path, dotted
from gradwire.jax_backend.zero.elementwise import (
    OPS,
    STRUCT,
    DifferentError,
    Trial,
    compare,
    joined,
    moved_on,
    on_host,
    quietly,
    shortened,
)
from gradwire.jax_backend.zero.fingerprints import fingerprints
from gradwire.jax_backend.zero.stacked_names import keys_of_slots, parameters_in, paths_in

#: Elements of one parameter of each shape, together: matrices that are orthogonalized take much
#: longer than what treats each element by itself.
LARGEST = 1 << 14


def require_independent(
    inner: optax.GradientTransformationExtraArgs,
    structure: Any,
    shards: StackShards,
    axis_name: AxisName,
) -> None:
    """Raise ValueError if parameters, optimized apart, come to other numbers than all together, or
    cannot be optimized.

    Args:
        inner: an optimizer.
        structure: of the tree of parameters.
        shards: how they are divided, in the order of the tree. Two of each stacked shape are tried
            on two replicas, three layers of each array of layers, what has owners on two of them,
            and one of those that are kept, shortened if they are large. Then those in a stack whose
            updates are computed otherwise than the first's.
        axis_name: the axes that `inner` may sum over.
    """
    if not any(spec.size for spec in shards.specs.values()) or not shards.places:
        return
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(
                quietly, lambda: WholeTrial(inner, structure, shards, axis_name).run()
            ).result()
    except DifferentError as error:
        raise ValueError(_refusal(str(error))) from None
    except Exception as error:  # of any optimizer
        raise ValueError(_refusal(f"it raised {type(error).__name__}: {error}")) from error


def _refusal(reason: str) -> str:
    return (
        "zero1: inner cannot work on some of the parameters alone (tried on random numbers,"
        f" {reason}). With shard='parameter' each replica has one parameter of each stack of W of"
        " one shape, under the name of the first of them, and some layers of what is stacked=. So"
        " inner must not mix parameters, as global norms do, nor such layers: put that before,"
        " optax.chain(all_reduce_mean(axis_name=…), transformation, zero1(inner, averaged=True,"
        " …)). Nor must it treat parameters of one shape differently by their names: put"
        " optax.multi_transform around, with a zero1 in each of its parts."
    )


class WholeTrial(Trial):
    """An optimizer on all parameters, which one replica has, beside the same on those of two
    replicas, and of two owners."""

    def _tried(self, shards: StackShards) -> StackShards:
        self._all = list(shards.specs)
        self._small = _small(shards)
        thinned = _thinned(shards, self._small)
        owned = [name for name in thinned if shards.places.get(name, ("",))[0] in shards.ragged]
        self._owners = [names for names in (owned[::2], owned[1::2]) if names]
        return StackShards(thinned, 2, shards.cut.intersection(thinned), pooled=False)

    def run(self) -> None:
        super().run()
        self._require_members_alike()

    def _require_members_alike(self) -> None:
        """Require that all in a stack, under the name of whose first they are optimized, come to
        one update of one gradient. Tried are those whose updates are computed otherwise."""
        given = self._given
        stacks = [
            list(filter(None, given.stacks[s])) for s in given.stacks if s not in given.ragged
        ]
        first = {name: names[0] for names in stacks for name in names}
        if first.keys() <= self._shards.specs.keys():
            return  # they have been tried
        computed = self._computed(first)
        odd = {name: one for name, one in first.items() if computed[name] != computed[one]}
        if not odd:
            return
        tried = [name for name in self._all if name in {*odd, *odd.values()}]
        specs = [self._small[name] for name in tried]
        signs = [self._random.choice((-1.0, 1.0, 1.0), spec.size) for spec in specs]

        def tree(magnitude: Callable[[Any], Any]) -> Any:
            each = dict(zip(tried, self._numbers_of(specs, signs, magnitude), strict=True))
            return self._tree({name: jnp.asarray(each[first[name]])[None] for name in tried})

        params, gradients = tree(lambda place: 10 - 9 * place), tree(lambda place: 1 + 9 * place)
        state = self._on_replicas(self._inner.init, 1)(params)
        update = jax.jit(self._on_replicas(self._update_one, 1), compiler_options=self._quick)
        for kind in ("plain", "late"):
            if kind == "late":
                state = jax.tree.map(moved_on, state)
            for _ in range(self._taken):
                updates, state = update(gradients, state, params)
                found = dict(zip(tried, map(on_host, jax.tree.leaves(updates)), strict=True))
                for name, one in odd.items():
                    compare(f"the update of {name!r}", found[one], found[name])

    def _computed(self, first: Mapping[str, str]) -> dict[str, int]:
        """How the update of each parameter is computed, those that share a slot taken for one."""
        params, state = self._real
        shapes = {name: spec.shape for name, spec in self._given.specs.items()}
        one = {dotted(name): dotted(first.get(name, name)) for name in self._all}
        own = list(one.values())
        in_state: list[tuple[str, ...]] = [
            (before, one[name], after) if name else (path,)
            for (path, _), (before, name, after) in zip(
                by_path(state),
                parameters_in(state, shapes),
                strict=True,
            )
        ]
        names = [*(("gradient", n) for n in own), *in_state, *(("parameter", n) for n in own)]
        update = self._on_replicas(self._update_one, 1)
        found = fingerprints(lambda *given: update(*given)[0], (params, state, params), names)
        return dict(zip(self._all, found, strict=True))

    @functools.cached_property
    def _real(self) -> tuple[Any, Any]:
        """Parameters and state of the sizes that they really have, without numbers."""
        return self._made({name: spec.shape for name, spec in self._given.specs.items()})

    def _made(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, Any]:
        specs = self._given.specs
        params = self._tree({n: STRUCT((1, *x), specs[n].dtype) for n, x in shapes.items()})
        return params, jax.eval_shape(self._on_replicas(self._inner.init, 1), params)

    def _require_shapes(self) -> None:
        given = self._given
        shards = given if given.world_size > 1 else StackShards(given.specs, 2, given.layers)
        specs, size = shards.specs, shards.world_size
        whole = {path: x.shape[1:] for path, x in by_path(self._real[1])}
        slots = {name: shards.slot_shape(name) for name in {*shards.stacks, *shards.cut}}
        own = {
            name: slots.get(name, spec.shape)
            for name, spec in specs.items()
            if shards.is_kept(name)
            or (shards.places[name][0] == name and name not in shards.ragged)
        }
        keys = keys_of_slots(self._inner.init, shards, self._tree, self._all)
        for (path, x), key in zip(by_path(self._made(own)[1]), keys, strict=True):
            paths, found = paths_in(key or "") or (path,), x.shape[1:]
            for name in filter(None, paths):
                expected = whole.get(name)
                if expected and key and len(paths) == 1:  # some layers
                    expected = (-(-expected[0] // size), *expected[1:])
                if expected != found:
                    raise DifferentError(
                        f"the state {name!r} has shape {whole.get(name)} of all parameters, and"
                        f" {found} of those of one replica"
                    )

    def _tree(self, leaves: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(
            self._structure, [leaves.get(name, optax.MaskedNode()) for name in self._all]
        )

    def _named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        return {name: jnp.asarray(x) for name, x in zip(self._shards.specs, arrays, strict=True)}

    def _whole(self, arrays: Sequence[Any]) -> Any:
        return self._tree({name: x[None] for name, x in self._named(arrays).items()})

    def _of_owners(self, arrays: Sequence[Any]) -> list[Any]:
        given = self._named(arrays)
        return [self._tree({name: given[name][None] for name in names}) for names in self._owners]

    def _cut(self, arrays: Sequence[Any]) -> Any:
        given = self._named(arrays)
        kept = {name: jnp.stack([x, x]) for name, x in given.items() if self._shards.is_kept(name)}
        stacked = self._shards.stacked(
            OPS, {name: x for name, x in given.items() if name not in kept}
        )
        return self._tree(stacked | kept)

    def _init_pieces(self) -> Any:
        alone = [
            self._on_replicas(self._inner.init, 1)(tree) for tree in self._of_owners(self._params)
        ]
        return super()._init_pieces(), alone

    def _update_pieces(self, update: Any, gradients: Any, state: Any, params: Any) -> Any:
        new, after = super()._update_pieces(update, gradients, state[0], params)
        each = zip(self._of_owners(gradients), state[1], self._of_owners(params), strict=True)
        alone = [self._on_replicas(update, 1)(*given) for given in each]
        return (new, [x for x, _ in alone]), (after, [x for _, x in alone])

    def _gradients(self, kind: str) -> list[np.ndarray[Any, Any]]:
        gradients = self._numbers(
            lambda place: (1 + 9 * place) * (place >= 0.5 if kind == "sparse" else 1)
        )
        if kind == "not finite":  # in one parameter alone, which another replica does not have
            owned = {name for names in self._owners for name in names}
            apart = [
                i
                for i, n in enumerate(self._shards.specs)
                if n in owned or not self._shards.is_kept(n)
            ]
            gradients[apart[0] if apart else 0].reshape(-1)[:1] = np.nan
        return gradients

    def _compare_updates(self, new: Any, cut: Any) -> np.ndarray[Any, Any]:
        updates = dict(
            zip(self._shards.specs, (on_host(x)[0] for x in jax.tree.leaves(new)), strict=True)
        )
        here = [
            name
            for name in self._shards.specs
            if self._shards.is_kept(name) or self._shards.places[name][0] == name
        ]
        for name, rows in zip(here, map(on_host, jax.tree.leaves(cut[0])), strict=True):
            if name in self._shards.cut:
                compare(f"the update of {name!r}", updates[name], joined(rows, updates[name]))
                continue
            for member, row in zip(self._shards.stacks.get(name, (name, name)), rows, strict=True):
                compare(f"the update of {member!r}", updates[member], row)
        for names, tree in zip(self._owners, cut[1], strict=True):
            for name, x in zip(names, jax.tree.leaves(tree), strict=True):
                compare(f"the update of {name!r}", updates[name], on_host(x)[0])
        return np.array([(x != 0).any() for x in updates.values()])

    def _check_state(self, whole: Any, pieces: Any) -> None:
        keys = keys_of_slots(self._inner.init, self._shards, self._tree, self._all)
        paths = [path for path, _ in by_path(pieces[0])]
        self._paths = [
            paths_in(key or "") or (path, path) for path, key in zip(paths, keys, strict=True)
        ]
        self._compare_states(whole, pieces)

    def _compare_states(self, whole: Any, pieces: Any) -> None:
        expected = {path: on_host(x)[0] for path, x in by_path(whole)}

        def same(path: str, found: np.ndarray[Any, Any], *, flat: bool = False) -> None:
            if path not in expected or not (flat or expected[path].shape == found.shape):
                raise DifferentError(f"the state {path!r} is not there, or has another shape")
            compare(
                f"the state {path!r}",
                expected[path],
                joined(found, expected[path]) if flat else found,
            )

        for paths, (_, x) in zip(self._paths, by_path(pieces[0]), strict=True):
            rows = on_host(x)
            if len(paths) == 1:
                same(paths[0], rows, flat=True)
                continue
            for path, row in zip(paths, rows, strict=True):
                same(path, row)
        for path, x in (leaf for state in pieces[1] for leaf in by_path(state)):
            same(path, on_host(x)[0])


Kind = tuple[Spec, bool]


def _kind(shards: StackShards, name: str) -> Kind:
    """What is alike for a trial: the shape, of three layers at most, and whether it has layers."""
    spec, cut = shards.specs[name], name in shards.cut
    return Spec((min(spec.shape[0], 3), *spec.shape[1:]), spec.dtype) if cut else spec, cut


def _small(shards: StackShards) -> dict[str, Spec]:
    """All parameters, made small. What is not alike stays so."""
    kinds = list(dict.fromkeys(_kind(shards, name) for name in shards.specs))
    small: dict[Kind, Spec] = {}
    for each, short in zip(
        kinds,
        shortened({str(i): s for i, (s, _) in enumerate(kinds)}, LARGEST).values(),
        strict=True,
    ):
        while short in small.values():
            short = Spec((*short.shape[:-1], short.shape[-1] + 1), short.dtype)
        small[each] = short
    return {name: small[_kind(shards, name)] for name in shards.specs}


def _thinned(shards: StackShards, small: Mapping[str, Spec]) -> dict[str, Spec]:
    """Two parameters of each stacked shape, one of each that is kept, has owners or is cut by
    layers."""
    alike: dict[Kind, list[str]] = {}
    for name in shards.specs:
        alike.setdefault(_kind(shards, name), []).append(name)
    stacks, taken = shards.stacks.keys() - shards.ragged, set[str]()
    for names in alike.values():
        of_stacks = [name for name in names if shards.places.get(name, ("",))[0] in stacks]
        # Of another kind of this shape one, for two would be a stack here.
        beside = [name for name in names if shards.places.get(name, ("",))[0] not in stacks]
        others = {shards.is_kept(name): name for name in reversed(beside)}
        taken |= {*of_stacks[:2], *list(others.values())[:1]}
    return {name: small[name] for name in shards.specs if name in taken}
