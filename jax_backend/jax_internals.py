"""What is private of JAX: nothing else in this backend names it.

`jax._src.distributed.global_state.client` is there from JAX 0.4 to 0.10 at least. Where it is not,
calls that all processes must make are made without a word about processes that do not come: JAX
then waits for them as it always does.
"""

from __future__ import annotations

from typing import Any

#: Of the client of the coordination service.
METHODS = ("blocking_key_value_get", "key_value_delete", "key_value_dir_get", "key_value_set")


def coordination_client() -> Any | None:
    """The client of the coordination service that `jax.distributed.initialize` has started; None if
    it has not, or if this JAX keeps it elsewhere."""
    try:
        from jax._src import distributed
    except ImportError:
        return None
    client = getattr(getattr(distributed, "global_state", None), "client", None)
    return client if all(hasattr(client, method) for method in METHODS) else None
