"""`gradwire doctor` in JAX: kernels in compiled programs, and messages and algorithms between
replicas, beside their known answers."""
