"""Which tensors share a message, and when a message may be sent."""
