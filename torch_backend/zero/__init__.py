"""Optimizers whose state is sharded over the ranks."""
