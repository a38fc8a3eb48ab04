"""The types of states, made known to `jax.export`."""

from __future__ import annotations

import json
from typing import Any

import jax
import optax  # type: ignore[import-untyped]
from jax import export

from gradwire.jax_backend.state.types import (
    Account,
    DataParallelState,
    LocalSGDState,
    PerReplica,
    Record,
)
from gradwire.jax_backend.zero.state import ZeroState

_PREFIX = "gradwire.jax_backend"


def register_for_export(*trees: Any) -> None:
    """Let `jax.export` serialize functions of these trees: it asks for a name for each type of
    NamedTuple in them.

        register_for_export(opt_state)
        blob = jax.export.export(step)(params, opt_state, batch).serialize()

    gradwire's own types are known as soon as it is imported. This is for those of optax: to be
    called before exporting, and again before `jax.export.deserialize` in another process. Types
    that are known already stay as they are.

    Args:
        *trees: of arrays or shapes, with any NamedTuples in them.
    """
    for tree in trees:
        for kind in sorted(_namedtuples(tree), key=lambda t: (t.__module__, t.__qualname__)):
            _register(kind, f"{kind.__module__}.{kind.__qualname__}")


def _namedtuples(tree: Any) -> set[type]:
    found: set[type] = set()

    def visit(x: Any) -> bool:
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            found.add(type(x))
        return False

    jax.tree.flatten(tree, is_leaf=visit)
    return found


def _register(kind: type, name: str) -> None:
    try:
        export.register_namedtuple_serialization(kind, serialized_name=name)
    except ValueError as error:
        if "duplicate" not in str(error).lower() and "already" not in str(error).lower():
            raise


def _own_types() -> None:
    for kind in (Account, DataParallelState, PerReplica, ZeroState, LocalSGDState):
        _register(kind, f"{_PREFIX}.{kind.__name__}")
    # stands in the memory of what is not compressed
    _register(optax.MaskedNode, "optax.MaskedNode")

    def from_bytes(stored: bytes) -> tuple[Any, ...]:
        axis_name, stages, *flags = json.loads(stored)
        return (
            tuple(axis_name) if isinstance(axis_name, list) else axis_name,
            tuple(stages),
            *flags,
        )

    def to_bytes(auxiliary: tuple[Any, ...]) -> bytes:
        return json.dumps(auxiliary).encode()

    export.register_pytree_node_serialization(
        Record,
        serialized_name=f"{_PREFIX}.Record",
        serialize_auxdata=to_bytes,
        deserialize_auxdata=from_bytes,
    )


_own_types()
