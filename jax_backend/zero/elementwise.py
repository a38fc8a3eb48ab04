"""Does an optimizer treat each element of a parameter by itself? Found out by trying it, on whole
parameters and on pieces.

A replica that holds a piece of every parameter may run an optimizer on it if element i of what
comes out depends on nothing but element i of the gradient, the state and the parameter, and on
numbers that all elements share. So `init` makes some updates of random numbers both ways and
compares every element. What mixes elements, or looks at a shape, comes to something else on pieces
of such numbers: their magnitudes differ from piece to piece, and some gradients are zero in some
pieces only, or not finite in one element, which no norm gets over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from gradwire.core.ops import Spec
from gradwire.core.zero.sharding import ElementShards
from gradwire.jax_backend.axes.mapped_axis import AxisName, axes_of
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.state.types import by_path

OPS = JaxOps()
STRUCT: Any = jax.ShapeDtypeStruct
FINFO: Any = jnp.finfo
#: Elements in a trial, which needs some hundred bytes for each: a quarter of a gigabyte at most.
LARGEST = 1 << 21
#: Updates with gradients of one kind: as many as it takes until every parameter has moved, which
#: accumulation delays; at most these.
PATIENCE = 64
#: What counters of steps are moved on by, for what begins or ends late.
LATE = 10**6
#: Allowed, relative to the element and to the root mean square of its parameter. Rounding is less:
#: the numbers are such that nothing cancels.
TOLERANCE = 1e-3
KINDS = ("plain", "sparse", "late", "not finite")


def divided_leaves(inner: optax.GradientTransformationExtraArgs, pieces: Any) -> tuple[bool, ...]:
    """Whether each leaf of the state of `inner` is in pieces, as parameters are; the others are
    equal on all replicas.

    Args:
        inner: an optimizer.
        pieces: `jax.ShapeDtypeStruct`s of the pieces of one replica. What changes with their sizes
            is in pieces.
    """

    def longer(x: Any) -> Any:
        return STRUCT((*x.shape[:-1], x.shape[-1] + 1) if x.shape else (2,), x.dtype)

    def shapes(params: Any) -> dict[Any, tuple[int, ...]]:
        state = jax.eval_shape(inner.init, params)
        return {path: x.shape for path, x in jax.tree_util.tree_flatten_with_path(state)[0]}

    before = shapes(pieces)
    try:
        after = shapes(jax.tree.map(longer, pieces))
    except Exception:  # of any optimizer; then every replica keeps what it has
        after = {}
    return tuple(after.get(path) != shape for path, shape in before.items())


def require_elementwise(
    inner: optax.GradientTransformationExtraArgs,
    structure: Any,
    shards: ElementShards,
    axis_name: AxisName,
) -> None:
    """Raise ValueError if pieces of parameters, optimized apart, come to other numbers than whole
    parameters, or cannot be optimized.

    Computes at once, also where the caller is traced.

    Args:
        inner: an optimizer.
        structure: of the tree of parameters.
        shards: how they are divided, in the order of the tree; where there is one replica, two are
            tried. Of more than `LARGEST` elements together the longest are tried shortened.
        axis_name: the axes that `inner` may sum over.
    """
    if not any(spec.size for spec in shards.specs.values()):
        return
    try:
        # A thread of its own is in no trace and in no map, whatever the caller is in.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(
                quietly, lambda: Trial(inner, structure, shards, axis_name).run()
            ).result()
    except DifferentError as error:
        raise ValueError(_refusal(str(error), axis_name)) from None
    except Exception as error:  # of any optimizer
        raise ValueError(
            _refusal(f"it raised {type(error).__name__}: {error}", axis_name)
        ) from error


def quietly(run: Callable[[], None]) -> None:
    """Run what has NaN among its numbers on purpose, and numbers of the host."""
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        np.errstate(all="ignore"),
    ):
        run()


def _refusal(reason: str, axis_name: AxisName) -> str:
    return (
        f"zero1: inner cannot work on pieces of parameters (tried on random numbers, {reason})."
        " Each replica holds 1/W of every parameter, in pieces of shape (1, …, k). So inner must"
        " not mix the elements of a parameter, as norms do: take an elementwise optimizer, and for"
        " optax.clip_by_global_norm(max_norm) that of gradwire.jax_backend,"
        f" clip_by_global_norm(max_norm, axis_name={axis_name!r}); for an optimizer that needs"
        " whole parameters pass shard='parameter'; what needs whole gradients can stand before:"
        " optax.chain(all_reduce_mean(axis_name=…), transformation, zero1(inner, averaged=True,"
        " …)). Nor must it decide by the shape of a parameter, or compute with it: decide by name,"
        " by number of dimensions, or with a tree of bools or numbers made from whole parameters."
        " elementwise=True leaves this trial out, and runs inner on pieces as it is."
    )


class DifferentError(Exception):
    """What comes out otherwise on pieces."""


class Trial:
    """An optimizer on whole parameters, which one replica has, beside the same on pieces, which
    several replicas have.

    Numbers are flat lists, of which trees are made where `inner` is called.
    """

    def __init__(self, inner: Any, structure: Any, shards: Any, axis_name: AxisName) -> None:
        self._inner = inner
        self._structure = structure
        self._axes = axes_of(axis_name)
        self._given, self._shards = shards, self._tried(shards)
        self._specs = list(self._shards.specs.values())
        self._random = np.random.default_rng(0)
        # Compiled quickly rather than well: it runs a few times.
        cpu = jax.default_backend() == "cpu"
        self._quick = {"xla_backend_optimization_level": 0} if cpu else None
        self._signs = [self._random.choice((-1.0, 1.0, 1.0), spec.size) for spec in self._specs]
        self._params = self._numbers(lambda place: 10 - 9 * place)

    def _tried(self, shards: Any) -> Any:
        """Those that are tried."""
        return ElementShards(shortened(shards.specs, LARGEST), max(shards.world_size, 2))

    def run(self) -> None:
        """Raise DifferentError if anything comes out otherwise on pieces; and what the optimizer
        raises."""
        self._require_shapes()
        whole = self._on_replicas(self._inner.init, 1)(self._whole(self._params))
        pieces = self._init_pieces()
        self._check_state(whole, pieces)
        update = jax.jit(self._update, compiler_options=self._quick)
        moved, self._taken = np.array([not spec.size for spec in self._specs]), 0
        for kind in KINDS:
            if kind == "late":
                whole, pieces = jax.tree.map(moved_on, (whole, pieces))
            for i in range(self._taken or PATIENCE):
                new, whole, cut, pieces = update(self._gradients(kind), self._params, whole, pieces)
                moves = self._compare_updates(new, cut)
                self._compare_states(whole, pieces)
                if kind == "plain" and (moves & ~moved).any():
                    moved, self._taken = moved | moves, i + 1
                if kind == "plain" and i and moved.all():
                    break
            if not self._taken:
                raise DifferentError(
                    f"it made no update in {PATIENCE} steps, so there is nothing to compare"
                )

    def _numbers(self, magnitude: Callable[[Any], Any]) -> list[np.ndarray[Any, Any]]:
        return self._numbers_of(self._specs, self._signs, magnitude)

    def _numbers_of(
        self, specs: Sequence[Spec], kept: Sequence[Any], magnitude: Callable[[Any], Any]
    ) -> list[np.ndarray[Any, Any]]:
        """Random numbers for each parameter, of a sign that each element keeps and a magnitude by
        its place between 0 and 1."""
        numbers = []
        for spec, signs in zip(specs, kept, strict=True):
            place = np.linspace(0, 1, spec.size)
            values = signs * magnitude(place) * self._random.uniform(0.5, 1.5, spec.size)
            numbers.append(values.reshape(spec.shape).astype(spec.dtype))
        return numbers

    def _gradients(self, kind: str) -> list[np.ndarray[Any, Any]]:
        gradients = self._numbers(
            lambda place: (1 + 9 * place) * (place >= 0.5 if kind == "sparse" else 1)
        )
        for g in gradients:
            if kind == "not finite" and g.size:
                g.reshape(-1)[0] = np.nan
        return gradients

    def _update(self, gradients: Any, params: Any, whole: Any, pieces: Any) -> tuple[Any, ...]:
        """Updates and state on whole parameters, and on pieces."""
        on_one = self._on_replicas(self._update_one, 1)
        on_whole = on_one(self._whole(gradients), whole, self._whole(params))
        return *on_whole, *self._update_pieces(self._update_one, gradients, pieces, params)

    def _update_one(self, updates: Any, state: Any, params: Any) -> Any:
        # Some transformations demand the value of the loss; the others do not look.
        return self._inner.update(updates, state, params, value=np.float32(1))

    def _init_pieces(self) -> Any:
        return self._on_replicas(self._inner.init, self._shards.world_size)(self._cut(self._params))

    def _update_pieces(self, update: Any, gradients: Any, state: Any, params: Any) -> Any:
        """Updates and state."""
        on_pieces = self._on_replicas(update, self._shards.world_size)
        return on_pieces(self._cut(gradients), state, self._cut(params))

    def _compare_updates(self, new: Any, cut: Any) -> np.ndarray[Any, Any]:
        """Which parameters move."""
        updates = [np.asarray(x[0]) for x in jax.tree.leaves(jax.device_get(new))]
        for name, x, y in zip(self._shards.specs, updates, jax.tree.leaves(cut), strict=True):
            compare(f"the update of {name!r}", x, joined(y, x))
        return np.array([(x != 0).any() for x in updates])

    def _on_replicas(self, fn: Callable[..., Any], size: int) -> Callable[..., Any]:
        """`fn` on so many replicas along the first axis, and one along the others."""
        for name in self._axes[1:]:
            fn = _on_one(fn, name)
        return jax.vmap(fn, axis_name=self._axes[0], axis_size=size)

    def _whole(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._structure, [jnp.asarray(x)[None] for x in arrays])

    def _cut(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.unflatten(
            self._structure, rows_of(self._shards, [jnp.asarray(x) for x in arrays])
        )

    def _require_shapes(self) -> None:
        """Require what `_check_state` does of the sizes that parameters really have: an optimizer
        may decide by them, and those that are tried are smaller."""
        given, size = self._given, max(self._given.world_size, 2)
        shards = ElementShards(given.specs, size)

        def state(rows: int, shapes: Callable[[str, Spec], tuple[int, ...]]) -> Any:
            specs = shards.specs.items()
            leaves = [STRUCT((rows, *shapes(name, spec)), spec.dtype) for name, spec in specs]
            tree = jax.tree.unflatten(self._structure, leaves)
            return jax.eval_shape(self._on_replicas(self._inner.init, rows), tree)

        whole = state(1, lambda _, spec: spec.shape)
        self._divided_alike(shards, whole, state(size, lambda name, _: shards.piece_shape(name)))

    def _check_state(self, whole: Any, pieces: Any) -> None:
        self._state_names = [path for path, _ in by_path(whole)]
        self._divided = self._divided_alike(self._shards, whole, pieces)
        self._compare_states(whole, pieces)

    def _divided_alike(self, shards: Any, whole: Any, pieces: Any) -> tuple[bool, ...]:
        """Which leaves of the state are in pieces. Raises DifferentError for what has neither the
        shape of a parameter nor one that all replicas share."""
        structures: list[Any] = [jax.tree.structure(state) for state in (whole, pieces)]
        if structures[0] != structures[1]:
            raise DifferentError("its state has another structure")
        of_one = [STRUCT(shards.piece_shape(name), s.dtype) for name, s in shards.specs.items()]
        divided = divided_leaves(self._inner, jax.tree.unflatten(self._structure, of_one))
        shapes = {spec.shape for spec in shards.specs.values()}
        each = zip(by_path(whole), jax.tree.leaves(pieces), divided, strict=True)
        for (name, x), piece, in_pieces in each:
            if in_pieces and x.shape[1:] not in shapes:
                raise DifferentError(
                    f"the state {name!r} has shape {x.shape[1:]}, which no parameter has"
                )
            if not in_pieces and x.shape[1:] != piece.shape[1:]:
                raise DifferentError(
                    f"the state {name!r} has shape {x.shape[1:]} of whole parameters, and"
                    f" {piece.shape[1:]} of pieces"
                )
        return divided

    def _compare_states(self, whole: Any, pieces: Any) -> None:
        each = zip(
            self._state_names,
            self._divided,
            jax.tree.leaves(whole),
            jax.tree.leaves(pieces),
            strict=True,
        )
        for name, divided, x, y in each:
            one, rows = on_host(x)[0], on_host(y)
            compare(f"the state {name!r}", one, joined(rows, one) if divided else rows)


def rows_of(shards: ElementShards, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The pieces of all replicas of each parameter, stacked."""
    size = shards.world_size
    return [
        OPS.rows([x], size).reshape((size, *shards.piece_shape(name)))
        for name, x in zip(shards.specs, arrays, strict=True)
    ]


def joined(pieces: Any, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(pieces).reshape(-1)[: like.size].reshape(like.shape)


def on_host(x: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def compare(what: str, expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> None:
    """Raise DifferentError for elements that differ by more than rounding, or are finite in one of
    them only."""
    same = (expected == found) | ((expected != expected) & (found != found))
    if same.all():
        return
    difference = np.inf
    if jnp.issubdtype(expected.dtype, jnp.floating):
        allowed = max(TOLERANCE, 8 * float(FINFO(expected.dtype).eps))
        expected, found = (x.astype(np.float64) for x in (expected, found))
        sizes = np.where(np.isfinite(expected), np.abs(expected), 0)
        off = np.abs(expected - found) / (sizes + np.sqrt(np.square(sizes).mean()))
        difference = np.where(same, 0, off).max()
        if difference <= allowed:
            return
    raise DifferentError(f"{what} was off by {difference:.1e}")


def _on_one(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`fn` where the axis `name` has one replica."""
    mapped = jax.vmap(fn, in_axes=None, axis_name=name, axis_size=1)
    return lambda *given: jax.tree.map(lambda x: x[0], mapped(*given))


def moved_on(counter: jax.Array) -> jax.Array:
    """Steps counted by each replica, moved on; other states as they are."""
    counts = (
        counter.ndim == 1
        and jnp.issubdtype(counter.dtype, jnp.integer)
        and counter.dtype.itemsize >= 4
    )
    return counter + jnp.asarray(LATE, counter.dtype) if counts else counter


def shortened(specs: Mapping[str, Spec], largest: int) -> dict[str, Spec]:
    """The longest dimension of the largest is halved until all together have no more elements than
    the `largest` trial."""
    shapes = {name: list(spec.shape) for name, spec in specs.items()}
    while sum(map(math.prod, shapes.values())) > largest:
        shape = max(shapes.values(), key=math.prod)
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    return {name: Spec(tuple(shape), specs[name].dtype) for name, shape in shapes.items()}
