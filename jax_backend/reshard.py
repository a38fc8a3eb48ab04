"""Moved to `gradwire.jax_backend.zero_state`: this path stays for one version, for states that were pickled under it."""

from gradwire.core.deprecated import old_module

__getattr__ = old_module(__name__, "gradwire.jax_backend.zero_state")
