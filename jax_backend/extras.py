"""Trees that are averaged along with parameters: BatchNorm's statistics, for instance."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from gradwire.jax_backend.parameter_names import flatten


class Extra:
    """A tree as `LocalSGD.average` takes it.

    Attributes:
        arrays: the floating arrays, owner → "" → array, with an owner that is no parameter. To be replaced by their averages.
    """

    def __init__(self, number: int, tree: Any) -> None:
        self._named = flatten(tree)
        self._owners = {
            name: f"extras[{number}]/{name}"
            for name, x in self._named.leaves.items()
            if jnp.issubdtype(jnp.result_type(x), jnp.floating)
        }
        self.arrays = {owner: {"": jnp.asarray(self._named.leaves[name])} for name, owner in self._owners.items()}

    def rebuilt(self) -> Any:
        return self._named.rebuild(
            {
                name: self.arrays[self._owners[name]][""] if name in self._owners else x
                for name, x in self._named.leaves.items()
            }
        )
