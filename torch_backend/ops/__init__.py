"""Kernels in torch."""
