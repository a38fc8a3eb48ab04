"""Kernels for processors, compiled by numba where that is installed: what takes torch several
passes over memory takes one or two."""
