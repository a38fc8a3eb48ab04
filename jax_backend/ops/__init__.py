"""Kernels in JAX."""
