"""Replicas of a model that FSDP2 has sharded: `compress_replicas`."""
