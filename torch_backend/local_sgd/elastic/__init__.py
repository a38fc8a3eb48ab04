"""Replicas that come and go, under a torchft `Manager`."""
