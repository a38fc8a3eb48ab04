"""The memory of an algorithm outside a program: plain nested dictionaries, of one replica or of all
of them, in one form for all backends.

**Of one replica**, as the torch handles' `rank_state_dict` gives it, which also says whose it is
("rank" and "replicas"):

    {"format": 1, "kind": "compressor", "algorithm": repr, "step": n,
     "shared": {key: array}, "tensors": {parameter: {key: array}}}

**Portable**, of all replicas. What differs between them has moved to "local", with a leading axis:
one row for each replica, or one row alone, their mean:

    {"format": 1, "kind": …, "algorithm": repr, "step": n, "replicas": W,
     "shared": …, "tensors": …, "local": {parameter: {key: rows}}}

All kinds of states are so: "compressor", "local_sgd" and "sharded_optimizer".

With another number of replicas every one begins with the mean, which keeps it. That is all that a
linear method needs, whose averages depend on the mean of the errors alone (low rank, random
elements). Others (largest elements, signs, codes) go on bit for bit from each replica's own row
alone.

Both may hold "scale", the loss scale in whose units per-replica memory is; 1 without it. Arrays are
of any framework; functions that compute are given its kernels. Nothing is changed in place, and
arrays are shared with what was given.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.core.algorithm import State
from gradwire.core.algorithms.shared.views import reproducing
from gradwire.core.ops import ITEMSIZE, A, Ops
from gradwire.core.text.wording import some

FORMAT = 1
#: kind → what takes such a state.
KINDS = {
    "compressor": "an algorithm's memory, for the handle of a hook or wrapper, or from_portable",
    "local_sgd": "local SGD's, for its handle",
    "sharded_optimizer": "a sharded optimizer's, for ZeroOptimizer.load_state_dict",
}
#: Options of `PowerSGD` that a state need not agree in by name: the shapes of the factors say which
#: matrices they are of.
VIEWS = ("stacked", "rows")
#: A step's number travels as an int32.
MOST_STEPS = 2**31 - 1
COMMON = ("algorithm", "step", "shared", "tensors")
#: Memories of a message that is on its way, which may be of a replica that has broken: the message
#: tells the others, and all go back.
ON_THEIR_WAY = frozenset({"difference"})
#: Between the parts of a flat name. Section and memory have none in theirs, so a parameter may.
SEPARATOR = "/"


@dataclass(frozen=True)
class StateMismatch:
    """How a saved state differs from what it is loaded into. False if it does not.

    Attributes:
        algorithm: the configurations, if they differ: (of the state, here).
        removed: parameters that only the state has memory of.
        added: parameters that only the model here has memory of.
        reshaped: descriptions of what both have, in different shapes or under different keys.
    """

    algorithm: tuple[str, str] | None = None
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.algorithm or self.removed or self.added or self.reshaped)

    def __str__(self) -> str:
        parts = []
        if self.algorithm:
            parts.append("the state is of {}, not of {}".format(*self.algorithm))
        if self.removed or self.added:
            only = {"there": self.removed, "here": self.added}
            names = [f"{some(names)} only {where}" for where, names in only.items() if names]
            parts.append(f"the state is of another model, with parameters {', '.join(names)}")
        # Another configuration explains the shapes, which may be those of all parameters.
        shown = self.reshaped[: 2 if self.algorithm else 5]
        more = [f"and {len(self.reshaped) - len(shown)} more"] if shown != self.reshaped else []
        return "; ".join([*parts, *shown, *more]) or "no difference"


def head(kind: str, algorithm: str, step: int) -> dict[str, Any]:
    """What every saved state begins with: of a kind in `KINDS`, with the configuration of its
    algorithm as text, after so many steps."""
    return {"format": FORMAT, "kind": kind, "algorithm": algorithm, "step": step}


def require_kind(state: Mapping[str, Any], kind: str, keys: Collection[str]) -> None:
    """Raise ValueError for what is no state of this kind, of a format that is not known, or not
    made of dictionaries as a state is."""
    if not isinstance(state, Mapping):
        raise ValueError(  # noqa: TRY004  (what a file holds)
            f"not a gradwire state: it is a {type(state).__name__} and not a dictionary"
        )
    missing = {"format", "kind", *keys} - set(state)
    found = state.get("kind", kind)
    if found != kind:
        if isinstance(found, str) and found in KINDS:
            raise ValueError(
                f"the state is {KINDS[found]}; here {KINDS[kind].split(',')[0]} is wanted"
            )
        raise ValueError(f"kind={found!r} in the state is none of {', '.join(map(repr, KINDS))}")
    if missing:
        raise ValueError(f"not a gradwire state: it lacks {sorted(missing)}")
    if isinstance(state["format"], bool) or state["format"] != FORMAT:
        raise ValueError(f"state of format {state['format']!r}; this version reads format {FORMAT}")
    for section in {"shared", "tensors", "local", "sharded"} & state.keys():
        inner = (
            ()
            if section == "shared"
            else ((f"{section!r} of {name!r}", x) for name, x in _items(state, section))
        )
        for what, memory in ((repr(section), state[section]), *inner):
            if not isinstance(memory, Mapping) or not all(isinstance(key, str) for key in memory):
                raise ValueError(
                    f"{what} in the state is {_shown(memory)}; it has to be a dictionary with names"
                    " for keys"
                )


def require_portable(state: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no state of all replicas, with rows for each of them, or one."""
    missing = {"format", *COMMON, "replicas", "local"} - set(state)
    if missing:
        raise ValueError(
            f"not a gradwire state of all replicas: it lacks {sorted(missing)}; gather() makes one"
            " of theirs"
        )
    replicas = state["replicas"]
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas={_shown(replicas)} in the state must be a number of replicas")
    require_kind(state, state.get("kind", "compressor"), ())
    for name, memory in state["local"].items():
        for key, rows in memory.items():
            if not _is_array(rows) or not rows.shape or rows.shape[0] not in (1, state["replicas"]):
                raise ValueError(
                    f"memory {key!r} of parameter {name!r} is {_kind(rows)} and not"
                    f" {state['replicas']} rows, or one"
                )


def require_finite(state: Mapping[str, Any]) -> None:
    """Raise ValueError for a state, in either form, with memory that holds NaN or inf, or no data:
    no step from it would ever be finite, so it would never be corrected either. What is on its way
    is forgotten when it arrives."""
    memories = [("shared state", state["shared"])]
    for section in ("tensors", "local"):
        memories += [
            (f"parameter {name!r}", memory) for name, memory in state.get(section, {}).items()
        ]
    for whose, memory in memories:
        for key, x in memory.items():
            if getattr(x, "is_meta", False):
                raise ValueError(
                    f"memory {key!r} of {whose} is a meta tensor in the state, which holds no data"
                )
            if key not in ON_THEIR_WAY and (bad := not_finite(x)) is not None:
                raise ValueError(
                    f"memory {key!r} of {whose} holds {bad} in the state: no step from it would be"
                    " finite. Load an earlier checkpoint, or leave the state out, and the memory"
                    " begins anew"
                )


def not_finite(x: Any) -> str | None:
    """What an array or a number holds besides finite numbers, in words; None if that is nothing."""
    if isinstance(x, (bool, int)) or (_is_array(x) and not _is_float(x)):
        return None
    if isinstance(x, float):
        return None if math.isfinite(x) else str(x)
    if not _is_array(x):
        return None
    finite = x.isfinite() if callable(getattr(x, "isfinite", None)) else np.isfinite(np.asarray(x))
    return None if bool(finite.all()) else "NaN or inf"


def scale_in(state: Mapping[str, Any]) -> float:
    """The loss scale in whose units the errors in a state are. Raises ValueError if that is
    none."""
    try:
        scale = float(state.get("scale", 1.0))
    except (TypeError, ValueError, OverflowError):
        scale = 0.0
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={state['scale']!r} in the state must be a positive number")
    return scale


def step_in(state: Mapping[str, Any]) -> int:
    """The number of steps after which a state is. Raises ValueError if it does not say so."""
    step = state["step"]
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST_STEPS:
        raise ValueError(f"step={_shown(step)} in the state must be a number of steps")
    return step


def fit(
    state: Mapping[str, Any], algorithm: str, current: State[A], kind: str = "compressor"
) -> tuple[State[A], StateMismatch]:
    """What of a state of one replica has a place here.

    Args:
        state: of one replica.
        algorithm: `repr` of the configuration here. Of views, only the shapes that come of them are
            compared.
        current: the memory here, whose names and shapes decide. Floating dtypes may differ.
        kind: of the state that is wanted, see `head`.

    Returns:
        The arrays to take over, as they are in `state`; and what does not fit, which is left out. A
        tensor may be there in part.

    Raises:
        ValueError: it is no state of this project, of a format that is not known, or its memory
            holds NaN or inf.
    """
    require_kind(state, kind, COMMON)
    step_in(state)
    require_finite(state)
    theirs = state["tensors"]
    reshaped = _mismatch("shared state", state["shared"], current.shared)
    for name, memory in current.tensors.items():
        if name in theirs:
            found = _mismatch(f"memory of parameter {name!r}", theirs[name], memory)
            reshaped += [f"{text}{_of_another_view(name, theirs[name], memory)}" for text in found]
    difference = StateMismatch(
        (
            (state["algorithm"], algorithm)
            if _without_views(state["algorithm"]) != _without_views(algorithm)
            else None
        ),
        tuple(sorted(set(theirs) - set(current.tensors))),
        tuple(sorted(set(current.tensors) - set(theirs))),
        tuple(reshaped),
    )
    kept = {
        name: _fitting(theirs[name], memory)
        for name, memory in current.tensors.items()
        if name in theirs
    }
    return State(_fitting(state["shared"], current.shared), kept), difference


def gather(
    ops: Ops[A], states: Sequence[Mapping[str, Any]], per_replica: Collection[str]
) -> dict[str, Any]:
    """The portable form of the states of all replicas, in their order, with a row for each of what
    `Algorithm.per_replica` names.

    Raises:
        ValueError: no state; or they are not of the same algorithm, step, scale and parameters, or
            not those of all ranks in order.
    """
    if not states:
        raise ValueError("states=[]: give the state of each replica, in order")
    first = states[0]
    for replica, state in enumerate(states):
        for what in ("format", "kind", "algorithm", "step", "scale"):
            if state.get(what) != first.get(what):
                raise ValueError(
                    f"replica {replica} has {what}={state.get(what)!r}, replica 0"
                    f" {first.get(what)!r}"
                )
        whose = state.get("rank", replica), state.get("replicas", len(states))
        if whose != (replica, len(states)):
            raise ValueError(
                f"states[{replica}] is that of rank {whose[0]} of {whose[1]}; give the state of"
                " each replica, in order"
            )
        if _keys(state) != _keys(first):
            raise ValueError(f"replica {replica} has memory of other parameters than replica 0")
    whole = {key: value for key, value in first.items() if key not in ("shared", "tensors", "rank")}
    whole |= {"replicas": len(states), "shared": dict(first["shared"]), "tensors": {}, "local": {}}
    for name, memory in first["tensors"].items():
        whole["tensors"][name] = {k: x for k, x in memory.items() if k not in per_replica}
        rows = {
            k: ops.stack([s["tensors"][name][k] for s in states])
            for k in memory
            if k in per_replica
        }
        if rows:
            whole["local"][name] = rows
    return whole


#: What a difference that is on its way counts for, beside it.
COUNTED = {"difference": "weight"}


def mean_of_rows(ops: Ops[A], rows: A, weights: A | None = None) -> A:
    """One row in place of one for each replica: by `weights` (W,), if there are any, and one of
    them is above 0."""
    if rows.shape[0] == 1:
        return rows
    # Wider than any memory, so that it does not depend on the order of the replicas.
    each = [ops.cast(rows[i], "float64") for i in range(rows.shape[0])]
    count: Any = float(rows.shape[0])
    if weights is not None:
        of_each = [ops.cast(weights[i], "float64") for i in range(rows.shape[0])]
        count = sum(of_each[1:], of_each[0])
        count = ops.where(count > 0, count, 1.0)
        each = [ops.where(w > 0, x * w, 0.0) for x, w in zip(each, of_each, strict=True)]
    return ops.stack([ops.cast(sum(each[1:], each[0]) / count, ops.dtype_of(rows))])


def mean_of_replicas(ops: Ops[A], state: Mapping[str, Any]) -> dict[str, Any]:
    """A portable state with one row, the mean, in place of one for each replica. Of what is on its
    way it is that which the message would bring."""
    local = {
        n: {
            k: mean_of_rows(ops, rows, memory.get(COUNTED.get(k, ""))) for k, rows in memory.items()
        }
        for n, memory in state["local"].items()
    }
    return {**state, "local": local}


def spread(ops: Ops[A], state: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """A portable state for this many replicas: with a row for each if it has that, else with one
    row, the mean."""
    require_portable(state)
    require_finite(state)
    if any(
        rows.shape[0] not in (1, replicas)
        for memory in state["local"].values()
        for rows in memory.values()
    ):
        state = mean_of_replicas(ops, state)
    return {**state, "replicas": replicas}


def of_replica(
    ops: Ops[A], state: Mapping[str, Any], replica: int, replicas: int
) -> dict[str, Any]:
    """The state of one of `replicas` replicas, from a portable one of any number of them: its own,
    or the mean. Raises ValueError for a state that is not portable."""
    whole = spread(ops, state, replicas)
    tensors = {name: dict(memory) for name, memory in whole["tensors"].items()}
    for name, memory in whole["local"].items():
        own = {k: rows[replica if rows.shape[0] > 1 else 0] for k, rows in memory.items()}
        tensors[name] = {**tensors.get(name, {}), **own}
    return {
        **{k: v for k, v in whole.items() if k not in ("replicas", "local")},
        "tensors": tensors,
    }


def renamed(
    state: Mapping[str, Any],
    names: Mapping[str, str] | Callable[[str], str],
    *,
    algorithm: str | None = None,
    tensor: Callable[[str, str, Any], Any] | None = None,
) -> dict[str, Any]:
    """A state under other parameter names: what another framework calls them.

        theirs = lambda name: name.replace(".", "/").replace("weight", "kernel")
        moved = renamed(state, theirs, algorithm=repr(algorithm))

    Args:
        state: in either form.
        names: name in the state → name in the result.
        algorithm: `repr` of the configuration there, if it differs (in patterns of names, or in
            `transpose`).
        tensor: `tensor(name, key, array)` gives the array to put there, with the name in the state.
            Per-replica memory in the portable form has its leading axis.

    Raises:
        ValueError: two names become one, or a mapping lacks one.
    """

    def new_name(name: str) -> str:
        if callable(names):
            return names(name)
        if name not in names:
            raise ValueError(f"names lacks parameter {name!r} of the state")
        return names[name]

    def moved(section: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        result: dict[str, dict[str, Any]] = {}
        for name, memory in section.items():
            if new_name(name) in result:
                raise ValueError(
                    f"parameter {name!r} and another one both become {new_name(name)!r}"
                )
            result[new_name(name)] = {
                k: tensor(name, k, x) if tensor else x for k, x in memory.items()
            }
        return result

    sections = {key: moved(state[key]) for key in ("tensors", "local") if key in state}
    return {
        **state,
        **sections,
        "algorithm": state["algorithm"] if algorithm is None else algorithm,
    }


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A state as what safetensors takes: flat name → array, and strings.

    arrays, metadata = flatten(state)
    safetensors.torch.save_file(arrays, path, metadata)
    """
    arrays = {f"shared{SEPARATOR}{key}": x for key, x in state["shared"].items()}
    metadata = {
        k: json.dumps(v) for k, v in state.items() if k not in ("shared", "tensors", "local")
    }
    for section in ("tensors", "local"):
        if section in state:
            # Of tensors that are compressed and remember nothing, no array would bear the name.
            metadata[section] = json.dumps(list(state[section]))
            arrays |= {
                SEPARATOR.join([section, name, key]): x
                for name, memory in state[section].items()
                for key, x in memory.items()
            }
    return arrays, metadata


def unflatten(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    """What `flatten` took apart. Raises ValueError if these are not its results."""
    try:
        state = {key: json.loads(value) for key, value in metadata.items()}
        for section in ("tensors", "local"):
            if section in state:
                state[section] = {name: {} for name in state[section]}
        state["shared"] = {}
        for flat, x in arrays.items():
            section, _, rest = flat.partition(SEPARATOR)
            name, _, key = rest.rpartition(SEPARATOR)
            if section == "shared":
                state["shared"][rest] = x
            else:
                state[section][name][key] = x
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "these arrays and strings do not come from gradwire.core.state.checkpoint.flatten"
        ) from error
    return state


def _keys(state: Mapping[str, Any]) -> dict[str, set[str]]:
    return {name: set(memory) for name, memory in state["tensors"].items()}


def _mismatch(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    described = [{key: _kind(x) for key, x in memory.items()} for memory in (theirs, ours)]
    return (
        []
        if described[0] == described[1]
        else [f"{what} is {described[0]} in the state, {described[1]} here"]
    )


def _of_another_view(name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What to do if a factor is of the same tensor, seen as other matrices; "" if that is not
    it."""
    factors = [tuple(memory["q"].shape) for memory in (theirs, ours) if _is_array(memory.get("q"))]
    tensors = {
        tuple(memory["error"].shape) for memory in (theirs, ours) if _is_array(memory.get("error"))
    }
    if len(factors) < 2 or len(tensors) > 1:
        return ""
    sides = [(*factor[:-2], factor[-1]) for factor in factors]
    if sides[0] == sides[1]:
        return ""  # another rank
    options = reproducing(name, tensors.pop(), factors[0]) if tensors else ""
    advised = (
        f"give PowerSGD {options} to go on with those"
        if options
        else "see `stacked` and `rows` of PowerSGD"
    )
    return f": the tensor was seen as other matrices; {advised}"


def _without_views(algorithm: str) -> str:
    """A configuration's `repr` without what it says of views and weights, on which memory does not
    depend."""
    try:
        tree = ast.parse(algorithm, mode="eval")
    except SyntaxError:  # not what a dataclass writes
        return algorithm
    call = tree.body
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "Weighted"
    ):
        tree.body = [*call.args, *(keyword.value for keyword in call.keywords)][0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in VIEWS]
    return ast.unparse(tree)


def _fitting(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: theirs[key]
        for key, x in ours.items()
        if key in theirs and _kind(theirs[key]) == _kind(x)
    }


def _items(state: Mapping[str, Any], section: str) -> list[tuple[Any, Any]]:
    return list(state[section].items()) if isinstance(state[section], Mapping) else []


def _shown(x: Any) -> str:
    """The value as messages have it, which do not print arrays."""
    text = repr(x)
    return text if len(text) < 60 else f"a {type(x).__name__}"


def _is_float(x: Any) -> bool:
    return _dtype(x) in ITEMSIZE


def _dtype(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _kind(x: Any) -> Any:
    """What has to agree: the shape, and the dtype unless it is floating."""
    if not _is_array(x):
        return type(x).__name__
    return "float" if _is_float(x) else _dtype(x), tuple(x.shape)
