"""Moved to `gradwire.jax_backend.parameter_names`: this path stays for one version."""

from gradwire.core.deprecated import old_module

__getattr__ = old_module(__name__, "gradwire.jax_backend.parameter_names")
