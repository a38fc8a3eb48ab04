"""Optimizer state divided among the replicas."""
