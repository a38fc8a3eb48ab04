"""Whether an optimizer treats each element of a parameter by itself, read from its jaxpr.

A replica that holds a part of every parameter may run an optimizer on that part if element i of what it makes depends on nothing but element i
of the gradient, the state and the parameter, and on numbers that are the same for all elements. A small abstract interpretation
follows each value through the program and says which of four kinds it is:

- `SAME`: one number, or an array of equal elements, that depends on no gradient: a step counter, a learning rate.
- `OWN`: element i depends on element i.
- `TABLE`: depends on no gradient, but its elements differ: noise, a mask of constants. Pieces of a parameter would all see its beginning.
- `MIXED`: elements of a parameter have met, in a norm for instance. Summed over the replicas, as `clip_by_global_norm` does, it is `SAME`
  again.

The programs of `init` and `update` are read for whole parameters and once more for pieces. Both must do the same arithmetic, with the same
numbers, or a mask or a rate made from a shape, which pieces do not have, would go wrong in silence.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from gradwire.jax_backend.axis import AxisName, axes_of, is_bound


class Kind(enum.IntEnum):
    """What a value is to the elements of parameters."""

    SAME = 0
    OWN = 1
    TABLE = 2
    MIXED = 3


@dataclass(frozen=True)
class Label:
    """A kind, and the primitive that made it so."""

    kind: Kind
    origin: str = ""


SAME = Label(Kind.SAME)
OWN = Label(Kind.OWN)

#: Primitives whose i-th element of the result depends on the i-th elements of the operands.
_POINTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
    integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or polygamma population_count pow
    real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_POINTWISE.split())
#: Primitives that keep the elements in their order, as long as there are as many before as after.
IN_ORDER = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "pvary", "pcast", "sharding_constraint"})
#: Each result is one operand.
PASSED_ON = frozenset({"optimization_barrier"})
REDUCED_OVER_REPLICAS = frozenset({"psum", "psum2", "psum_invariant", "pmax", "pmin"})


def divided_leaves(
    inner: optax.GradientTransformationExtraArgs,
    whole: Any,
    pieces: Any,
    axis_name: AxisName,
    replicas: int,
    *,
    check: bool,
) -> tuple[bool, ...]:
    """Of each leaf of the state of `inner` whether it is in pieces, as parameters are; the others are equal on all replicas. One replica owns
    such `pieces` of the `whole` parameters, all `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: with `check`, for an `inner` that mixes elements of a parameter, by the name of the primitive.
    """
    try:
        program = _Program(inner, whole, axis_name, replicas)
        updates, states = program.labels()
        # Before anything is traced in pieces, which may not work at all.
        found = _what_mixes(updates, states, program) if check else None
        in_pieces = None if found else _Program(inner, pieces, axis_name, replicas)
        if check and in_pieces:
            in_pieces.labels()
    except Exception as error:
        if not check:  # Nothing is known: every replica keeps what it has.
            return (True,) * len(jax.tree.leaves(jax.eval_shape(inner.init, pieces)))
        if isinstance(error, TypeError) and "required keyword-only argument" in str(error):
            raise TypeError(
                f"zero1: update of inner asks for more than gradients, state and parameters: {error}. What evaluates the loss by itself, as optax.lbfgs "
                "does, cannot be divided among the replicas; check=False runs it as it is, with what update of zero1 is given"
            ) from error
        error.add_note("zero1: while it traced inner on abstract parameters and pieces; check=False leaves that out")
        raise
    if in_pieces is None:
        raise ValueError(found)
    if check and (in_pieces.arithmetic != program.arithmetic or in_pieces.state_names != program.state_names):
        raise ValueError(
            "zero1: inner decides by the shape of a parameter, or computes with it, and a replica sees pieces of shape (1, …, k): it does something "
            "else for pieces than for whole parameters. Decide by name, by number of dimensions, or with a mask that is a tree of "
            "bools (optax.masked(inner, mask_made_from_whole_parameters)), and let rates be a tree of numbers made from whole parameters; check=False "
            "runs it as it is."
        )
    if in_pieces.state_names != program.state_names:
        return (True,) * len(in_pieces.state)
    same_shape = [a.shape == b.shape for a, b in zip(program.state, in_pieces.state, strict=True)]
    return tuple(x.kind in (Kind.OWN, Kind.MIXED) or not same for x, same in zip(states, same_shape, strict=True))


def _what_mixes(updates: list[Label], states: list[Label], program: _Program) -> str | None:
    """Why this optimizer cannot be given pieces."""
    found = [
        *((x, f"the update of {name!r}") for x, name in zip(updates, program.names, strict=True)),
        *((x, f"the state {name!r}") for x, name in zip(states, program.state_names, strict=True)),
    ]
    for label, what in found:
        if label.kind is Kind.MIXED:
            return (
                f"zero1: inner mixes elements of a parameter ({label.origin}, in {what}), and each replica holds only 1/W of every "
                "parameter. Take an elementwise optimizer, and for optax.clip_by_global_norm(max_norm) "
                f"gradwire.jax_backend.clip_by_global_norm(max_norm, axis_name={program.axis_name!r}). What needs whole gradients can "
                "stand before: optax.chain(all_reduce_mean(axis_name=…), transformation, zero1(inner, averaged=True, …)). check=False runs "
                "it as it is, on pieces."
            )
    shapes = {leaf.shape for leaf in program.params}
    for label, leaf, name in zip(states, program.state, program.state_names, strict=True):
        if label.kind is Kind.OWN and leaf.shape not in shapes:
            return f"zero1: the state {name!r} of inner has shape {leaf.shape}, which no parameter has; check=False keeps it"
    return None


def _names(tree: Any, separator: str = ".") -> tuple[str, ...]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(jax.tree_util.keystr(path, simple=True, separator=separator) for path, _ in paths)


class _Program:
    """`inner.init` and `inner.update` as jaxprs."""

    def __init__(
        self, inner: optax.GradientTransformationExtraArgs, params: Any, axis_name: AxisName, replicas: int
    ) -> None:
        self.axis_name = axis_name
        axes = axes_of(axis_name)
        # Only the product matters here.
        sizes = (replicas, *(1 for _ in axes[1:]))
        env = [] if is_bound(axis_name) else list(zip(axes, sizes, strict=True))
        self.params = jax.tree.leaves(params)
        self.names = _names(params, "/")

        def update(updates: Any, state: Any, params: Any) -> Any:
            # Some transformations demand the value of the loss; the others do not look.
            return inner.update(updates, state, params, value=np.float32(1))

        self.init, state = jax.make_jaxpr(inner.init, axis_env=env, return_shape=True)(params)
        self.state, self.state_names = jax.tree.leaves(state), _names(state)
        self.update, (updates, _) = jax.make_jaxpr(update, axis_env=env, return_shape=True)(params, state, params)
        self.updates = jax.tree.leaves(updates)

    def labels(self) -> tuple[list[Label], list[Label]]:
        """Of the updates, and of the state after any number of steps. Afterwards `arithmetic` says what is computed, with which numbers."""
        own = [OWN] * len(self.params)
        begun = _Walk(axes_of(self.axis_name))
        states = begun.closed(self.init, own)
        while True:
            walk = _Walk(axes_of(self.axis_name))
            results = walk.closed(self.update, [*own, *states, *own])
            self.arithmetic = [begun.arithmetic, walk.arithmetic]
            updates, new = results[: len(self.updates)], results[len(self.updates) :]
            joined = [_join([a, b]) for a, b in zip(states, new, strict=True)]
            if joined == states:
                return updates, states
            states = joined


@dataclass
class _Walk:
    """Follows the values through a program.

    Attributes:
        axes: of the replicas.
        arithmetic: what is computed, without the shapes of what looks like a parameter.
    """

    axes: tuple[str, ...]
    arithmetic: list[tuple[str, ...]] = field(default_factory=list)

    def closed(self, body: Any, labels: list[Label]) -> list[Label]:
        return self._jaxpr(body.jaxpr, body.consts, labels) if hasattr(body, "jaxpr") else self._jaxpr(body, [], labels)

    def _jaxpr(self, jaxpr: Any, constants: Sequence[Any], labels: list[Label]) -> list[Label]:
        known: dict[Any, Label] = dict(zip(jaxpr.invars, labels, strict=True))
        for variable, x in zip(jaxpr.constvars, constants, strict=True):
            known[variable] = _of_constant(x)
            self.arithmetic.append(("constant", _said(x)))

        def label(variable: Any) -> Label:
            return _of_constant(variable.val) if hasattr(variable, "val") else known[variable]

        for eqn in jaxpr.eqns:
            operands = [label(v) for v in eqn.invars]
            known.update(zip(eqn.outvars, self._results(eqn, operands), strict=True))
        self.arithmetic += [("result", _said(v.val)) for v in jaxpr.outvars if hasattr(v, "val")]
        return [label(v) for v in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[Label]) -> list[Label]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name == "cond" and operands[0].kind is Kind.SAME:
            sides = [self.closed(branch, operands[1:]) for branch in eqn.params["branches"]]
            return [_join(list(choices)) for choices in zip(*sides, strict=True)]
        body = _body(eqn)
        if body is not None:
            return self.closed(body, operands)
        joined = _join(operands)
        self._note(eqn, joined.kind)
        if name in PASSED_ON:
            return operands
        if name in REDUCED_OVER_REPLICAS:
            over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            whole = set(self.axes) <= set(over if isinstance(over, (tuple, list)) else (over,))
            return [
                SAME if x.kind is Kind.MIXED and whole else x if x.kind is Kind.SAME else Label(Kind.MIXED, name)
                for x in operands
            ]
        size = eqn.outvars[0].aval.size
        if name in ELEMENTWISE or name in IN_ORDER:
            # A scalar parameter that meets all elements of another one.
            spread = any(x.kind is Kind.OWN and v.aval.size != size for x, v in zip(operands, eqn.invars, strict=True))
            return [Label(Kind.MIXED, name) if spread and joined.kind is Kind.OWN else joined] * count
        if joined.kind in (Kind.OWN, Kind.MIXED):
            return [joined if joined.kind is Kind.MIXED else Label(Kind.MIXED, name)] * count
        if name == "axis_index":
            return [Label(Kind.MIXED, name)] * count
        origin = joined.origin or name
        return [SAME if v.aval.size <= 1 else Label(Kind.TABLE, origin) for v in eqn.outvars]

    def _note(self, eqn: Any, kind: Kind) -> None:
        # A number may be made from a shape: a rate divided by how many inputs there are.
        numbers = [_said(v.val) for v in eqn.invars if hasattr(v, "val")]
        name = eqn.primitive.name
        if name in IN_ORDER:
            if numbers:
                self.arithmetic.append(tuple(numbers))
            return
        options = [str(v) for v in eqn.params.values() if isinstance(v, int)]
        # What is not elementwise, of values that no gradient is in, may count them.
        if name not in ELEMENTWISE and kind in (Kind.SAME, Kind.TABLE):
            options += [str(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
        self.arithmetic.append((name, *numbers, *options))


def _said(x: Any) -> str:
    """An array of equal elements as one of them."""
    if isinstance(x, jax.core.Tracer) or not np.size(x):
        return ""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    values = np.asarray(x)
    uniform = values == values.reshape(-1)[0]
    return str(values.reshape(-1)[0]) if np.all(uniform) else hashlib.sha256(values.tobytes()).hexdigest()


def _join(labels: Sequence[Label]) -> Label:
    """What a function of values of these kinds is, element by element."""
    largest = max(labels, key=lambda x: x.kind, default=SAME)
    if largest.kind is Kind.TABLE and OWN in labels:
        return Label(Kind.MIXED, largest.origin)
    return largest


def _of_constant(x: Any) -> Label:
    if np.size(x) <= 1 or isinstance(x, jax.core.Tracer):
        return SAME if np.size(x) <= 1 else Label(Kind.TABLE, "an array")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return Label(Kind.TABLE, "an array of keys")
    values = np.asarray(x)
    return SAME if (values == values.reshape(-1)[0]).all() else Label(Kind.TABLE, "an array of constants")


def _body(eqn: Any) -> Any:
    """The program of an equation that only calls it: jit, a custom derivative, a checkpoint."""
    if eqn.primitive.name in ("cond", "while", "scan"):
        return None
    bodies = [p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(getattr(p, "jaxpr", None), "eqns")]
    if len(bodies) != 1:
        return None
    inner = getattr(bodies[0], "jaxpr", bodies[0])
    return bodies[0] if len(inner.invars) == len(eqn.invars) and not inner.constvars else None
