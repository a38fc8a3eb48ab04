"""Whether a method helps: what a network and a device take, measured; what follows for a step; and
what to do."""
