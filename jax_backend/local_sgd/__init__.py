"""Replicas that train by themselves between averages of their parameters."""
