"""Moved to `gradwire.core.kernels.random`: this path stays for one version."""

from gradwire.core.deprecated import old_module

__getattr__ = old_module(__name__, "gradwire.core.kernels.random")
