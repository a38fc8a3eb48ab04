"""Shapes of JAX models, without memory for their weights: whatever builds one is traced and not
run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.core.ops import Spec
from gradwire.jax_backend.state.names import flatten, specs_of, stacks_of


def abstract_parameters(build: Callable[[], Any]) -> Any:
    """What `build()` returns, as a tree of `jax.ShapeDtypeStruct`; of modules, their trained
    parameters.

    Args:
        build: without arguments; returns a tree of arrays, an `nnx.Module`, an Equinox module, or a
            `linen.Module` with its inputs, `(module, x)`. Anything else that it returns, a torch
            module say, is returned as it is.

    Raises:
        ValueError: a linen module without inputs.
        Exception: whatever `build` raises.
    """
    other: list[Any] = []

    def traced() -> Any:
        made = build()
        if hasattr(made, "named_parameters"):
            other.append(made)
            return ()
        return _parameters(made)

    shapes = jax.eval_shape(traced)
    return other[0] if other else shapes


def specs_of_parameters(parameters: Any) -> dict[str, Spec]:
    """Shape and dtype by name; see `gradwire.jax_backend.parameter_shapes`."""
    leaves = flatten(parameters).leaves
    return specs_of(leaves, stacks_of(parameters))


def _parameters(made: Any) -> Any:
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    module, *inputs = made if isinstance(made, tuple) and made else (made,)
    if linen is not None and isinstance(module, linen.Module):
        if not inputs:
            raise ValueError(
                f"{type(module).__name__} has no parameters before it has seen an input: return"
                " (module, x), as for module.init(key, x)"
            )
        variables = module.init(jax.random.key(0), *inputs)
        return variables["params"]
    if nnx is not None and isinstance(made, nnx.Module):
        return nnx.state(made, nnx.Param)
    if (
        isinstance(made, Mapping)
        and set(made) >= {"params"}
        and isinstance(made["params"], Mapping)
    ):
        return made["params"]
    return jax.tree.map(_parameter, made)


def _parameter(x: Any) -> Any:
    """An array of floats; None for other leaves of a module, such as functions."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")) or not jnp.issubdtype(
        x.dtype, jnp.floating
    ):
        return None
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)
