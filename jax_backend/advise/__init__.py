"""What `gradwire.advise` measures with JAX."""
