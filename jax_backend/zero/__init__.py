"""ZeRO: an Optax transformation whose state is divided among the replicas."""
