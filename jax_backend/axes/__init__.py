"""The mapped axes of the replicas, and those that the compiler manages."""
