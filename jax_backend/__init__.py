"""gradwire for JAX."""
